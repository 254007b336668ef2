# What one machine of the run does; $1 is its number.
set -uo pipefail
cd @directory@ || exit 1
@setup@
# In a session of its own, so that signals come from here alone.
setsid treadle train @config@ --auto-resume --nodes @nodes@ --node-rank "$1" --rendezvous @rendezvous@ --workers.processes @gpus@ --workers.max-restarts @restarts@ < /dev/null &
run=$!
echo "$run" > "$HOME/@pid_file@.$1"
signalled=0
trap "signalled=1; kill -TERM $run 2> /dev/null" TERM INT HUP # HUP: the connection was lost
while :; do
  signalled=0
  wait "$run"
  code=$?
  [ "$signalled" -eq 0 ] && break # else a signal ended the wait, not the run
done
rm -f "$HOME/@pid_file@.$1"
exit "$code"
