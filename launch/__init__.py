"""The command line, configuration files and reports."""
