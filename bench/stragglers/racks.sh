#!/usr/bin/env bash
# One of eight workers, of two in each of four racks on this machine, sleeps ten times as long as the others. It prints how long
# rank 0 takes for 100 steps: for the six workers of the other racks, and for all eight with each treatment of late racks.
#
#   cargo build --bin paramhub --example exchange
#   bench/stragglers/racks.sh [ROUNDS]
set -euo pipefail

rounds=${1:-3}
programs=$PWD/target/debug
manager=http://127.0.0.1:4711
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -r "$logs"' EXIT

# Waits until a program says that it is ready, and shows what it says otherwise.
await() {
    for _ in $(seq 100); do
        if grep -q " ready: " "$1"; then return; fi
        sleep 0.1
    done
    cat "$1" >&2
    exit 1
}

"$programs/paramhub" manager --listen "${manager#http://}" > "$logs/manager" 2>&1 &
await "$logs/manager"
for rack in a b c d; do
    "$programs/paramhub" hub --join "$manager" --rack "$rack" --cores 1 --listen 127.0.0.1:0 > "$logs/$rack" 2>&1 &
done
for rack in a b c d; do
    await "$logs/$rack"
done

# Starts a worker in its rack.
in_rack='racks=(a a b b c c d d); PARAMHUB_RACK=${racks[$RANK]} exec "$@"'
measure() {
    local workers=$1 stragglers=$2
    shift 2
    "$programs/paramhub" run -n "$workers" --hub "$manager" --hubs $((workers / 2)) --reduction sharded \
        --stragglers "$stragglers" -- bash -c "$in_rack" worker \
        "$programs/examples/exchange" --steps 100 --compute-ms 20 --by-job-steps "$@" 2>> "$logs/run" |
        sed -n "s/.*rank 0 finished 100 steps in \([^:]*\):.*/$workers workers, $stragglers: \1/p"
}
for _ in $(seq "$rounds"); do
    measure 6 wait
    measure 8 wait --slow 6:10
    measure 8 backup:2 --slow 6:10
    measure 8 drop:0.5 --slow 6:10
done
