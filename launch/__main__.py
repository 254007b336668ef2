"""`python -m treadle.launch` is `treadle`."""

from treadle.launch.cli import main

if __name__ == "__main__":
    main()
