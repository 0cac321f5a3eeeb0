#!/bin/sh
# Runs the container's command. A command that names a file of ToSSim's trainer, which this project does not have, ends
# with one line that says what to write instead.
command="$*"

# /app exists only as a mount, in commands that mount the checkout there instead of at /work.
[ "$PWD" != /work ] || [ ! -d /app ] || cd /app

replaced() { # FILE ADVICE
    case "$command" in
    *"$1"*)
        if [ ! -e "$1" ]; then
            echo "error: $1: no such file; $2 (docs/guides/from_atropos.md)" >&2
            exit 2
        fi
        ;;
    esac
}

replaced grpo_colocated.py \
    "write torchrun --nproc_per_node=N -m colocated_grpo --config FILE, without 'source myenv/bin/activate'"
replaced myenv/bin/activate "leave it out: the packages in /opt/venv are active"
exec "$@"
