#!/usr/bin/env bash
# Shows on the terminal how far common/setup.sh is: elapsed seconds, and the progress of pip or uv with the remaining time, or the
# last line of its log, or the command. Ends with setup.sh, its parent.
#
#     bash common/setup_progress.sh VENV LOG COMMAND...
venv=$1 log=$2 command=${*:3}

progress() { # prints how much is done, how much that is in all, and of what, as in "310 645 MB of tensorflow"
    local packages=("$venv"/lib/*/site-packages/*.dist-info)
    awk -v installed="${#packages[@]}" '
        /^ *Downloading / { name = $2; sub(/-[0-9].*/, "", name) }                              # pip and uv
        /^Progress / { done = $2 / 1e6; all = $4 / 1e6; what = "MB of " name }                  # pip --progress-bar=raw
        /^Downloading .*MiB\)$/ { size[$2] = substr($3, 2) + 0; all += size[$2]; what = "MiB" } # uv: all begin at once
        /^ Downloaded / { done += size[$2] }
        /^Installing collected packages: / { all = NF - 3; done = installed < all ? installed : all; what = "packages" }
        END { if (all >= 1 && (done < all || what == "packages")) printf "%d %d %s\n", done, all, what }' "$log"
}

while sleep 1 && kill -0 "$PPID"; do
    read -r have all what < <(progress)
    [[ $last == "$all $what" ]] || last="$all $what" began=$SECONDS
    said=$(tail -n 1 "$log") said=${said:-$command} && [[ -z $all ]] || said="$have of $all $what"
    ((have < 1)) || said+=", about $(((SECONDS - began + 1) * (all - have) / have)) s left"
    printf '\r\e[K%d s: %.70s' "$SECONDS" "$said"
done 2>/dev/null >/dev/tty
