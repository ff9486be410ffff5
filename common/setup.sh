#!/usr/bin/env bash
# Finds the Python that runs this project, and on first use makes it: `.venv`, with what requirements.txt lists.
#
#     source common/setup.sh      # sets PYTHON, or exits: 1 after one line that says what to do, 130 on Ctrl-C
#
# It takes the first of these that will do:
#   1. the active virtual (or Conda) environment, if it has the requirements and imports `common` from this checkout;
#   2. `.venv`, which is made, or completed, whenever requirements.txt, pyproject.toml, its Python or its place changed.

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    # The work is done in a shell of its own, so that its traps, locks and variables don't reach the caller's.
    PYTHON=$(bash "${BASH_SOURCE[0]}") || exit $?
    unset PYTHONHOME # as `activate` does: it would give .venv another Python's library
    if [[ -n ${PYTHONPATH:-} ]]; then # it goes before installed packages, and may hold another clone's `common`
        PYTHONPATH=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P):$PYTHONPATH
    fi
    return 0
fi

set -u
say() { printf '%s\n' "$*" >&2; }
die() { say "cannot set up: $*"; exit 1; }

[[ $OSTYPE == linux* ]] ||
    die "this is $OSTYPE, which lacks what the tasks take from Linux (prctl, /proc, namespaces); run it under WSL2 or in a" \
        "container, see README.md, \"Where it runs\""

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || exit 1
venv=$root/.venv
stamp=$venv/setup-stamp       # written last: how .venv came to be, and what it was made from
lock=$root/.venv-setup.lock   # locked during a set-up; while .venv is unfinished, it says how far one may go to mend it
log=$root/.venv-setup.log

supported="Python 3.10 to 3.13"
version_ok='(3, 10) <= sys.version_info[:2] <= (3, 13)'   # the versions that TensorFlow has wheels for
install_python="install $supported (Debian, Ubuntu: sudo apt-get install python3 python3-venv)"

# ---------------------------------------------------------------------------------------------------------------------
# What is there already

# Says in a few words why the Python $1 won't do, and nothing if it will. -I: whatever PYTHONPATH and user site hold.
shortcoming() {
    [[ -x $1 ]] || { echo "has no Python"; return; }
    "$1" -I -c '
import importlib.util, os, sys
root = sys.argv[1]
if not '"$version_ok"':
    sys.exit("has Python %d.%d, not 3.10 to 3.13" % sys.version_info[:2])
try:
    from importlib.metadata import PackageNotFoundError, version
    from packaging.requirements import Requirement
except ImportError:
    sys.exit("lacks packages of requirements.txt")
with open(os.path.join(root, "requirements.txt"), encoding="utf-8") as file:
    lines = [line.split("#")[0].strip() for line in file]
for wanted in (Requirement(line) for line in lines if line and not line.startswith("-")):
    if wanted.marker is None or wanted.marker.evaluate():
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            sys.exit("lacks %s" % wanted)
        if not wanted.specifier.contains(found, prereleases=True):
            sys.exit("has %s %s, not %s" % (wanted.name, found, wanted.specifier))
spec = importlib.util.find_spec("common")
if spec is None or spec.origin is None:
    sys.exit("lacks `common` (pip install -e .)")
if os.path.realpath(spec.origin) != os.path.join(root, "common", "__init__.py"):
    sys.exit("has the `common` of another folder, %s" % os.path.dirname(spec.origin))
' "$root" 2>&1 </dev/null | tail -n 1 # of a traceback, the error
}

# What .venv depends on. `-V` costs 3 ms and notices a Python that was upgraded or removed under it.
ingredients() {
    printf '%s\n' "$root" "$("$venv/bin/python" -V 2>&1)" "$(<"$root/requirements.txt")" "$(<"$root/pyproject.toml")"
}

up_to_date() {
    [[ -f $stamp && -x $venv/bin/python && ! -s $lock ]] && [[ $(tail -n +2 "$stamp") == "$(ingredients)" ]]
}

use() { printf '%s\n' "$1"; exit 0; }

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n $active && ! $active -ef $venv ]]; then
    why=$(shortcoming "$active/bin/python")
    [[ -n $why ]] || use "$active/bin/python"
    # Conda activates `base` in every terminal: that says nothing about what the user wants here
    [[ -z ${VIRTUAL_ENV:-} && ${CONDA_DEFAULT_ENV:-} == base ]] ||
        say "the active environment $active $why; using .venv"
fi
up_to_date && use "$venv/bin/python"

# Says which other checkout the environment belongs to that .venv is a link to. A link to another disk is fine, for example.
owner() {
    local made_for around
    made_for=$(sed -n 2p "$stamp" 2>/dev/null)
    around=$(CDPATH='' cd -P -- "$venv" 2>/dev/null && cd .. && pwd -P)
    if [[ -n $made_for && $made_for != "$root" && $made_for/.venv -ef $venv ]]; then
        echo "$made_for"
    elif [[ $around != "$root" && -f $around/common/setup.sh ]]; then
        echo "$around" # which may not have finished it
    fi
}

if [[ -L $venv ]]; then
    [[ -d $venv ]] || die "$venv is a link to a folder that is not there; make that folder or remove the link"
    other=$(owner)
    [[ -z $other ]] || die "$venv is a link to the environment of $other; remove the link, and the next run makes one here"
fi

# ---------------------------------------------------------------------------------------------------------------------
# A Python to make .venv with

find_python() { # sets python; or else no_python, the most useful of the reasons
    local candidate verdict new='' old='' bare=''
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        # Run it: being on PATH says little, as pyenv has a shim there for every version, selected or not
        verdict=$("$candidate" -I -c '
import sys
name = "%d.%d" % sys.version_info[:2]
if not '"$version_ok"':
    print(("new " if sys.version_info >= (3, 14) else "old ") + name)
else:
    try:
        import venv
        from ensurepip import bootstrap
        print("good " + name)
    except ImportError:
        print("bare " + name)
' 2>/dev/null </dev/null)
        case $verdict in
            good\ *) python=$candidate; return ;;
            new\ *) new=${new:-${verdict#new }} ;;
            old\ *) old=${old:-${verdict#old }} ;;
            bare\ *) bare=${bare:-${verdict#bare }} ;;
        esac
    done
    if [[ -n $bare ]]; then
        no_python="Python $bare has no venv module; install it (Debian, Ubuntu: sudo apt-get install python3-venv)"
    elif [[ -n $new ]]; then
        no_python="Python $new is too new for TensorFlow; $install_python"
    elif [[ -n $old ]]; then
        no_python="Python $old is too old; $install_python"
    else
        no_python="no Python found; $install_python"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Making .venv, or completing it

explain() { # dies with what the output $2 of the failed step $1 means
    local line
    case $2 in
        *'No space left'* | *'Errno 28]'* | *'quota exceeded'* | *'Errno 122]'*)
            die "no space left on the disk of $root or of ${TMPDIR:-/tmp}; free 4 GB and try again (log: $log)" ;;
        *'Permission denied'* | *'Read-only file system'*)
            die "no permission to write to $root, .venv or ${TMPDIR:-/tmp}; make them writable and try again" \
                "(log: $log)" ;;
        *'connection broken by'* | *'Failed to establish a new connection'* | *'Max retries exceeded'* | \
        *'name resolution'* | *'Could not resolve'* | *'Network is unreachable'* | *ConnectionError* | \
        *'timed out'* | *TimeoutError* | *'Could not fetch URL'*)
            die "no network: pip can't reach its package index; connect, or set pip's proxy or index, and try again" \
                "(log: $log)" ;;
        *'from versions: none'*) # with --retries=0, all that pip says of a network that is down
            line=${2##*No matching distribution found for }
            die "pip found no ${line%%$'\n'*}: connect to the network; if it is up, this package has no build for" \
                "your machine and Python (log: $log)" ;;
    esac
    line=$(printf '%s\n' "$2" | grep -i 'error' | tail -n 1)
    die "$1 failed: ${line:-$(printf '%s\n' "$2" | tail -n 1)} (log: $log)"
}

logged() { # runs a command; what it says goes to the log and into $output
    output=$(set -o pipefail; LC_ALL=C "$@" 2>&1 </dev/null | tee -a "$log" 2>/dev/null)
}

mark() { # writes into the lock file what a crash from here on would leave behind
    { printf '%s' "$1" >"$lock"; } 2>/dev/null || explain "writing $lock" "No space left"
}

empty_venv() { find -H "$venv" -mindepth 1 -delete 2>/dev/null; } # the folder itself may be a link to another disk

made_here() { [[ -f $stamp && $(head -n 1 "$stamp") == made ]]; } # not the user's own environment

venv_works() { "$venv/bin/python" -I -c 'import sys; sys.exit(not '"$version_ok"')' 2>/dev/null </dev/null; }

python='' no_python=''
find_python
[[ -n $python || -x $venv/bin/python ]] || die "$no_python"

# Two first runs at the same time: the lock goes with the open file, so Python can take it for this shell, and the
# system drops it when this shell and its children are gone, however they ended.
failure=$( { : >>"$lock"; } 2>&1) || explain "opening $lock" "$failure"
exec 9>>"$lock"
"${python:-$venv/bin/python}" -I -c '
import fcntl, signal, sys
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("another run is setting up .venv; waiting for it", file=sys.stderr, flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks: one first run at a time, then
' </dev/null || exit 130
up_to_date && use "$venv/bin/python"

left=$(<"$lock") # by a run that was killed: "making" a .venv of ours, or "mending" one that the user had
if [[ $left == making || -z $(ls -A "$venv" 2>/dev/null) ]]; then
    plan=making
elif made_here && { [[ $(sed -n 2p "$stamp") != "$root" ]] || ! venv_works; }; then
    plan=making # its paths are absolute: it does not survive a move, nor the loss of its Python
elif venv_works; then
    plan=mending
else
    die "$venv is not an environment of $supported; remove it and try again"
fi

clean_up() {
    case $plan in
        making) empty_venv; [[ -L $venv ]] || rmdir "$venv" 2>/dev/null; : >"$lock" ;;
        none) : >"$lock" ;;
    esac
}
trap clean_up EXIT
trap 'say "stopped; the next run sets up again"; exit 130' INT
trap 'exit 143' TERM HUP

finish() {
    local why
    why=$(shortcoming "$venv/bin/python")
    [[ -z $why ]] || die "pip succeeded, but $venv $why (log: $log)"
    if ! { printf '%s\n' "$1" && ingredients; } 2>/dev/null >"$stamp.new" || ! mv -f "$stamp.new" "$stamp"; then
        explain "writing $stamp" "No space left"
    fi
    plan=none
    use "$venv/bin/python"
}

{ : >"$log"; } 2>/dev/null
if [[ $plan == making ]]; then
    [[ -n $python ]] || die "$no_python"
    say "setting up .venv (once; takes a minute or two)"
    mark making
    empty_venv
    place=$(if [[ -d $venv ]]; then CDPATH='' cd -P -- "$venv" && pwd -P; else echo "$venv"; fi) # venv refuses links
    logged "$python" -I -m venv --without-pip "$place" || explain "python -m venv" "$output"
    maker=made
else
    maker=found
    ! made_here || maker=made
    why=$(shortcoming "$venv/bin/python")
    [[ -n $why || -n $left ]] || finish "$maker"
    say "updating .venv, which ${why:-may be incomplete}"
    if [[ $maker == made ]]; then mark making; else mark mending; fi
fi

# pip in a step of its own: venv would not pass on why that failed. (Other tools make a .venv that has no pip, too.)
logged "$venv/bin/python" -I -m pip --version || logged "$venv/bin/python" -I -m ensurepip --default-pip ||
    explain "python -m ensurepip" "$output"

# -I: packages that PYTHONPATH or the user's site happen to show don't count as installed. `-e .` is relative to $root.
# The user's settings of pip hold, but for the two that would send the packages, or the messages, elsewhere.
cd "$root" || exit 1
if ! PIP_USER=0 PIP_QUIET=0 logged "$venv/bin/python" -I -m pip install --disable-pip-version-check --no-input \
    --progress-bar off ${left:+--force-reinstall} -r requirements.txt; then
    if [[ $plan == mending && $output != *'Installing collected packages'* ]]; then
        plan=none # pip failed before it touched anything
        [[ -z $left ]] || plan=mending
    fi
    explain "pip install" "$output"
fi
finish "$maker"
