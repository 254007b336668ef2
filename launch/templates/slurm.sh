#!/bin/bash
# One task per GPU; each is a rank. A failed attempt is started again from the newest checkpoint, a preempted job is queued again.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@gpus@
#SBATCH --gpus-per-node=@gpus@
#SBATCH --cpus-per-task=@cpus@
#SBATCH --time=@time@
#SBATCH --output=@log@
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@@grace@
@options@
set -uo pipefail

cd @directory@ || exit 1
@setup@

stopping=0 again=0 signalled=0
# To the ranks, which save and end; srun itself, when signalled, kills them.
stop() { scancel --quiet --signal=TERM "$SLURM_JOB_ID"; }
trap 'stopping=1 signalled=1; stop' TERM INT
# The time limit is near: save, and queue for more.
trap 'stopping=1 again=1 signalled=1; stop' USR1

attempt=0
while :; do
  # --kill-on-bad-exit: one dead rank ends the attempt, and no other waits for it.
  srun --kill-on-bad-exit=1 --cpus-per-task=@cpus@ treadle train @config@ --auto-resume &
  step=$!
  [ "$stopping" -eq 0 ] || stop # asked while it started
  while :; do
    signalled=0
    wait "$step"
    code=$?
    [ "$signalled" -eq 0 ] && break # else a signal ended the wait, not the step
  done
  if [ "$again" -eq 1 ] && [ "$code" -eq 0 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ "$stopping" -eq 1 ]; then
    exit "$code"
  fi
  attempt=$((attempt + 1))
  if [ "$attempt" -gt @restarts@ ]; then
    echo "treadle: the run failed @attempts@ times; the last exit code was $code" >&2
    exit "$code"
  fi
  echo "treadle: exit code $code; start $((attempt + 1)) of @attempts@ goes on from the newest checkpoint" >&2
done
