#!/usr/bin/env bash
# Makes a freshly rented GPU server ready for weft. Run again at any time: what is done stays done.
#
#   scripts/remote_setup.sh [--dry-run] [--big-disk PATH] [--dir NAME] user@host [ssh options...]
#   scripts/remote_setup.sh [--dry-run] [--big-disk PATH] --local         (on the server itself)
#
#   --dry-run        print every command, run none
#   --big-disk PATH  where caches and .venv go (default: the roomiest writable disk that is not the home's)
#   --dir NAME       folder of the checkout below the remote home (default: weft)
#
# It copies the checkout (never .git, which may hold credentials; never over newer files, so that records measured on
# the server survive), checks the driver, links the caches to the big disk (moving what is in them, deleting nothing),
# makes a learning folder, then runs `make setup` and the doctor. Its status is the doctor's.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=false
local_mode=false
big_disk=
dir=weft

say() { printf 'remote-setup: %s\n' "$*"; }
fail() {
    printf 'remote-setup: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 1
}
usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

# Prints a command as it could be typed, and runs it unless this is a dry run.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    "$dry_run" || "$@"
}

while [[ $# -gt 0 ]]; do
    case $1 in
        --dry-run) dry_run=true ;;
        --local) local_mode=true ;;
        --big-disk | --dir)
            [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value" "$0 --help"
            if [[ $1 == --dir ]]; then dir=$2; else big_disk=$2; fi
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*) fail "unknown option $1" "$0 --help (ssh options come after user@host)" ;;
        *) break ;;
    esac
    shift
done

# ---- from the laptop: copy the checkout, then run this script over there

copy_and_continue() {
    local host=$1 commit quoted_dir unpack command
    shift
    quoted_dir=$(printf '%q' "$dir")
    commit=$(git -C "$here" rev-parse --verify -q --short=12 HEAD 2> /dev/null || true)
    if [[ -n $commit && -n $(git -C "$here" status --porcelain -- src) ]]; then commit+=+; fi
    unpack="tar -xz --no-same-owner --warning=no-ignore-newer --keep-newer-files -C $quoted_dir"
    command="cd $quoted_dir && WEFT_COMMIT=$(printf '%q' "$commit") bash scripts/remote_setup.sh --local"
    [[ -z $big_disk ]] || command+=" --big-disk $(printf '%q' "$big_disk")"

    say "copying $here to $host:$dir"
    run ssh "$@" "$host" "mkdir -p -- $quoted_dir"
    printf '+ tar -cz (files that git tracks or does not ignore) | ssh%s %q %q\n' \
        "$([[ $# -eq 0 ]] || printf ' %q' "$@")" "$host" "$unpack"
    # shellcheck disable=SC2029  # the folder is quoted for the far side on purpose
    if ! "$dry_run"; then
        # git lists deleted files too, so only those that are there go into the archive.
        (cd -- "$here" && git ls-files -z --cached --others --exclude-standard |
            while IFS= read -r -d '' file; do
                if [[ -f $file || -L $file ]]; then printf '%s\0' "$file"; fi
            done |
            COPYFILE_DISABLE=1 tar -cz --no-recursion --null -T -) |
            ssh "$@" "$host" "$unpack"
    fi
    say "continuing on $host"
    run ssh "$@" "$host" "$command"
}

# ---- on the server

check_driver() {
    local gpus
    if ! gpus=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1); then
        local reason="nvidia-smi gives no GPU: ${gpus:-not found}"
        local remedy="rent an image with the NVIDIA driver, or: sudo apt-get install nvidia-driver-580-server && sudo reboot"
        if "$dry_run"; then
            say "$reason (a real run would stop here; fix: $remedy)"
            return
        fi
        fail "$reason" "$remedy"
    fi
    say "GPUs: ${gpus//$'\n'/; }"
}

# Installs Debian packages, as root or through a sudo that asks for no password.
install_packages() {
    local as_root=()
    if [[ $(id -u) -ne 0 ]]; then as_root=(sudo -n); fi
    command -v apt-get > /dev/null || fail "missing: $*" "install them with this system's package manager"
    run "${as_root[@]}" apt-get update -q
    run "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" ||
        fail "apt-get could not install $*" "sudo apt-get install $*"
}

check_tools() {
    local missing=()
    command -v make > /dev/null || missing+=(make)
    command -v python3 > /dev/null || missing+=(python3)
    python3 -c 'import venv, ensurepip' 2> /dev/null || missing+=(python3-venv)
    command -v cc > /dev/null || missing+=(build-essential) # Triton builds its launcher
    if [[ ${#missing[@]} -gt 0 ]]; then install_packages "${missing[@]}"; fi
}

# The mount point with the most room among writable disks other than the home's; empty when the home has most.
find_big_disk() {
    local home_source best='' best_free=0 source free mount
    home_source=$(df -P -- "$HOME" | awk 'NR == 2 { print $1 }')
    best_free=$(df -P -k -- "$HOME" | awk 'NR == 2 { print $4 }')
    while read -r source free mount; do
        case $mount in
            / | /boot* | /etc/* | /proc* | /sys* | /dev* | /run* | /tmp | /usr/* | /snap/* | /mnt/wsl* | /mnt/c) continue ;;
        esac
        if [[ $source != "$home_source" && -d $mount && -w $mount && $free -gt $best_free ]]; then
            best=$mount best_free=$free
        fi
    done < <(df -P -k -x tmpfs -x devtmpfs -x squashfs -x efivarfs 2> /dev/null |
        awk 'NR > 1 { free = $4; source = $1; sub(/^([^ ]+ +){5}/, ""); print source, free, $0 }')
    printf '%s' "$best"
}

# link FOLDER NAME: FOLDER becomes a link to NAME on the big disk; what it held moves there, nothing is deleted.
link() {
    local folder=$1 target=$big_disk/weft-caches/$2 aside
    if [[ -L $folder ]]; then
        say "already a link: $folder -> $(readlink -- "$folder")"
        if [[ ! -e $folder ]]; then run mkdir -p -- "$(readlink -- "$folder")"; fi # the disk was emptied
        return
    fi
    [[ -d $(dirname -- "$folder") ]] || run mkdir -p -- "$(dirname -- "$folder")"
    if [[ -e $folder ]]; then
        run mkdir -p -- "$big_disk/weft-caches"
        aside=$target
        # Something is there already, from a home that was lost: keep both.
        if [[ -e $target ]]; then aside=$target.from-home-$(date +%Y%m%d-%H%M%S); fi
        run mv -- "$folder" "$aside"
    fi
    run mkdir -p -- "$target"
    run ln -s -- "$target" "$folder"
}

link_caches() {
    local free
    if [[ -z $big_disk ]]; then
        big_disk=$(find_big_disk)
        if [[ -z $big_disk ]]; then
            say "no writable disk has more room than the home's: caches stay where they are"
            return
        fi
    fi
    [[ $big_disk == /* ]] || fail "--big-disk $big_disk is not an absolute path" "--big-disk /mnt/data"
    "$dry_run" || [[ -d $big_disk && -w $big_disk ]] ||
        fail "$big_disk is no folder that $(id -un) can write" "sudo mkdir -p $big_disk && sudo chown $(id -un) $big_disk"
    free=$(df -P -h -- "$big_disk" 2> /dev/null | awk 'NR == 2 { print $4 }' || true)
    say "caches and .venv go to $big_disk (${free:-unknown} free)"
    link "$HOME/.cache/pip" pip
    link "$HOME/.cache/huggingface" huggingface
    link "$HOME/.cache/torch" torch
    link "$HOME/.cache/torchinductor" torchinductor
    link "$HOME/.triton" triton
    link "$here/.venv" venv
}

# write FILE: standard input becomes FILE, in a dry run only its name is shown.
write() {
    printf '+ write %q\n' "$1"
    if "$dry_run"; then cat > /dev/null; else cat > "$1"; fi
}

make_learning_folder() {
    local learn=$HOME/weft-learn
    run mkdir -p -- "$learn"
    {
        printf '# Written by scripts/remote_setup.sh; use it with: source ~/weft-learn/env.sh\n'
        # Inductor's own default lies in /tmp, which a restart empties.
        # shellcheck disable=SC2016
        printf 'export TORCHINDUCTOR_CACHE_DIR="$HOME/.cache/torchinductor"\n'
        # Records name the commit that was measured; a copied checkout has no .git to ask.
        if [[ -n ${WEFT_COMMIT:-} ]]; then printf 'export WEFT_COMMIT=%q\n' "$WEFT_COMMIT"; fi
        printf 'cd -- %q\n. .venv/bin/activate\n' "$here"
    } | write "$learn/env.sh"
    if [[ -e $learn/README.md ]]; then
        say "keeping $learn/README.md"
        return
    fi
    write "$learn/README.md" << 'END'
# weft-learn

Your own folder: experiments, notes, kernels. Nothing here is touched by a later set-up, except `env.sh`.

    source ~/weft-learn/env.sh   # the environment, the caches, and the checkout as working folder
    weft doctor                  # is the machine as it should be
    make report                  # measure it
    make gpu-test                # the tests that need a GPU
END
}

set_up_here() {
    say "setting up $here"
    check_driver
    check_tools
    link_caches
    make_learning_folder
    run make -C "$here" setup
    cd -- "$here"
    run .venv/bin/python -m weft doctor
}

if "$local_mode"; then
    [[ $# -eq 0 ]] || fail "--local takes no host, got $1" "$0 --local"
    set_up_here
else
    [[ $# -ge 1 ]] || fail "which server?" "$0 user@host   (or on the server itself: $0 --local)"
    copy_and_continue "$@"
fi
