#!/usr/bin/env bash
# Starts both processes, without systemd and without `holobiont up`, and stays with them.
#
#   HOLOBIONT_MODEL=MODEL.gguf all.sh [OPTION OF GATEWAY...]
#
# Prints `ready http://ADDRESS` when they serve. SIGTERM and SIGINT stop the gateway first, so that its requests end
# while the executor still computes. Nothing is restarted: if a process ends unasked, the other is stopped too.
# Exit code: 0 if both ended in order, else that of the first that did not.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# The processes stop in order when their standard input ends: also if this script is killed and can tell them nothing.
pipes=$(mktemp -d)
mkfifo "$pipes/lifeline" "$pipes/greeting"
exec {lifeline}<>"$pipes/lifeline" {greeting}<>"$pipes/greeting"

# In sessions of their own: a terminal's Ctrl-C is for this script, which knows the order.
setsid "$here/base-executor.sh" --exit-with-stdin <"$pipes/lifeline" >/dev/null {lifeline}>&- {greeting}>&- &
executor=$!
setsid "$here/gateway.sh" --exit-with-stdin "$@" <"$pipes/lifeline" >"$pipes/greeting" {lifeline}>&- {greeting}>&- &
gateway=$!

# end PID...: asks each to stop, in this order, and waits for it. Fails with the first exit code that is not 0.
end() {
    local pid code=0
    for pid in "$@"; do
        kill -TERM "$pid" 2>/dev/null
        wait "$pid" || code=$((code ? code : $?))
    done
    return "$code"
}

stop() {
    trap '' TERM INT
    end "$gateway" "$executor"
    exit
}
trap stop TERM INT
trap 'rm -rf "$pipes"' EXIT

# The first line is the address; a process that ends before it is a reason to stop waiting.
until read -r -t 0.2 line <&"$greeting"; do
    kill -0 "$executor" 2>/dev/null && kill -0 "$gateway" 2>/dev/null || break
done
[[ -z ${line:-} ]] || echo "$line"

wait -n -p ended "$executor" "$gateway"
code=$?
trap '' TERM INT
if [[ $ended == "$executor" ]]; then name=base-executor other=$gateway; else name=gateway other=$executor; fi
echo "error: $name ended unasked with exit code $code; its last lines above say why" >&2
end "$other"
exit $((code ? code : 1))
