#!/bin/bash
# One command per machine over ssh; each starts a process per GPU. Ctrl-C or SIGTERM reaches every machine: the ranks save and end.
set -uo pipefail

hosts=(@hosts@)
options=(-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4)
node=@node_script@

stop() {
  local rank
  for rank in "${!hosts[@]}"; do
    ssh "${options[@]}" "${hosts[$rank]}" "kill -TERM \"\$(cat \"\$HOME/@pid_file@.$rank\")\"" < /dev/null 2> /dev/null &
  done
}

state=$(mktemp -d) || exit 1
trap 'rm -rf "$state"' EXIT

stopped=0
stop_once() {
  if [ "$stopped" -eq 0 ]; then
    stopped=1
    stop
  fi
}
trap stop_once TERM INT USR1

for rank in "${!hosts[@]}"; do
  (
    trap : TERM INT # what stops a machine's run comes through `stop`, once
    # -tt: a lost connection hangs up on the machine's own script.
    setsid ssh -tt "${options[@]}" "${hosts[$rank]}" "bash -c $node treadle $rank" < /dev/null
    code=$?
    if [ "$code" -ne 0 ]; then
      echo "treadle: ${hosts[$rank]} (node $rank) ended with exit code $code" >&2
      (set -o noclobber && echo "$code" > "$state/failed") 2> /dev/null # the first failure is the script's own
      kill -USR1 $$ # the others would wait for it
    fi
  ) &
done

while [ -n "$(jobs -rp)" ]; do wait; done # a signal ends `wait`, not the machines' runs
exit "$(cat "$state/failed" 2> /dev/null || echo 0)"
