# What the scripts share. Sourced, never run.
# shellcheck shell=bash disable=SC2034 # what is set here is used there

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target_dir=${CARGO_TARGET_DIR:-$root/target}

if [[ -t 2 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi

# A step, on stderr: stdout is for data.
say() { echo "${bold}==>${plain} $*" >&2; }

# What went wrong, and what to do about it.
die() {
    echo "error: $1" >&2
    shift
    (($# == 0)) || echo "  try: $*" >&2
    exit 1
}

# What a check has seen, and when.
ok() { printf '    %-70s %4d s\n' "$*" "$SECONDS" >&2; }

# must WHAT COMMAND...: names what does not hold. A check that has more to tell then has a function `explain`.
must() {
    local what=$1
    shift
    if ! "$@"; then
        ! declare -F explain >/dev/null || explain >&2 || true
        die "not so: $what"
    fi
    ok "$what"
}

not() { ! "$@"; }

# until_true SECONDS COMMAND...: tries again until it succeeds; a watchdog, not a limit of speed.
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}

# need COMMAND PACKAGE: refuses, by name, to go on without a command.
need() {
    command -v "$1" >/dev/null || die "$1 is not installed" "$2"
}

need_build_tools() {
    need cargo "install Rust from https://rustup.rs"
    need gcc "apt install gcc"
    need python3 "apt install python3"
}

# All programs of a release, and those that people type; the others are started by these.
readonly all_programs=(holobiont gateway base-executor lora-worker holobiont-client holobiont-trainer endpoint-picker holobiont-simulator)
readonly typed_programs=(holobiont holobiont-client holobiont-simulator)

# build PROFILE PROGRAM...: builds programs, and nothing else. By their names and not by `--package`: cargo then chooses
# the features of what they are made of for the whole workspace, so all builds share what is compiled.
build() {
    local profile=$1
    shift
    cargo build --quiet --profile "$profile" --manifest-path "$root/Cargo.toml" "${@/#/--bin=}" >&2
}

# build_small PROGRAM...: builds for use. Debug information, most of a program, goes into PROGRAM.debug beside it, where
# debuggers find it, and backtraces do.
build_small() {
    build release "$@"
    local program
    for program in "${@/#/$target_dir/release/}"; do
        # Cargo puts the whole program back whenever it is asked for it.
        [[ $(readelf --sections --wide "$program") != *.gnu_debuglink* ]] || continue
        objcopy --only-keep-debug --compress-debug-sections=zlib "$program" "$program.debug"
        objcopy --strip-debug --add-gnu-debuglink="$program.debug" "$program" "$program.small"
        # In one step, and not in place: cargo has a link to the whole program, and somebody may be running it.
        mv "$program.small" "$program"
    done
}

# os_release NAME: a field of /etc/os-release.
os_release() (
    # shellcheck source=/dev/null
    . /etc/os-release && echo "${!1:-}"
)

# why_no_debian MODEL: prints why no fresh Debian can run a model here, or nothing.
why_no_debian() {
    [[ $(id -u) == 0 ]] || { echo "it needs root" && return; }
    command -v mmdebstrap >/dev/null || { echo "mmdebstrap is not installed; apt install mmdebstrap" && return; }
    [[ $(os_release ID) == debian ]] || { echo "this is no Debian, whose libraries it needs" && return; }
    [[ -e $1 ]] || { echo "there is no model $1; scripts/fetch-model" && return; }
    unshare --mount true 2>/dev/null || echo "namespaces are not allowed here"
}

# answer_able REASON OPTION: ends a script that is asked by --able whether it can run, and one that cannot.
answer_able() {
    if [[ $2 == --able ]]; then
        echo -n "$1"
        [[ -z $1 ]]
        exit
    fi
    [[ -z $1 ]] || die "${0##*/} cannot run: $1"
}

# debian_image: prints the path of a minimal Debian of this machine's release as a tar file, made at the first call.
debian_image() {
    local suite image
    suite=$(os_release VERSION_CODENAME)
    image=$root/target/package/debian-$suite.tar
    mkdir -p "${image%/*}"
    if [[ ! -e $image ]]; then
        say "making a minimal Debian ($suite)"
        mmdebstrap --quiet --format=tar --variant=minbase --include=systemd "$suite" "$image.new" >&2
        mv "$image.new" "$image"
    fi
    echo "$image"
}

# packaging_options OUT ARGUMENTS...: what scripts that package are told. Sets profile, cargo_profile, wants_build and out.
packaging_options() {
    profile=release wants_build=1 out=$1
    shift
    local usage="${0##*/} [--profile release|debug] [--no-build] [--out DIR]"
    while (($#)); do
        case $1 in
            --profile) profile=${2:-} && shift ;;
            --no-build) wants_build='' ;;
            --out) out=${2:-} && shift ;;
            *) die "unknown option $1" "$usage" ;;
        esac
        shift
    done
    case $profile in
        release) cargo_profile=release ;;
        debug) cargo_profile=dev ;;
        *) die "there is no profile $profile" "$usage" ;;
    esac
}

# build_to_package PROGRAM...: builds them, unless they are to be there already, as packaging_options heard.
build_to_package() {
    if [[ -n $wants_build ]]; then
        say "building ($profile)"
        build "$cargo_profile" "$@"
    fi
    local program
    for program in "$@"; do
        [[ -x $target_dir/$profile/$program ]] || die "target/$profile/$program is not built" "leave out --no-build"
    done
}

# make_documents FOLDER: manual pages and completions, as the programs know them; of those whose name nobody else's program
# has. Whoever packages puts them where they are looked for.
make_documents() {
    local program
    rm -rf "$1"
    mkdir -p "$1"/{man,bash,zsh,fish}
    "$target_dir/$profile/holobiont" man --out "$1/man" >/dev/null
    for program in "${all_programs[@]}"; do
        [[ $program == holobiont* ]] || continue
        "$target_dir/$profile/$program" completions bash >"$1/bash/$program"
        "$target_dir/$profile/$program" completions zsh >"$1/zsh/_$program"
        "$target_dir/$profile/$program" completions fish >"$1/fish/$program.fish"
    done
}

# platform PROGRAM...: prints the manylinux tag of the machines that run the programs. They may link to what manylinux has alone.
platform() {
    local foreign glibc
    foreign=$(readelf --dynamic --wide "$@" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort --unique |
        grep -vxE 'lib(c|m|dl|rt|pthread)\.so\.[0-9]+|libgcc_s\.so\.1|ld-linux-.*' || true)
    [[ -z $foreign ]] || die "the programs need ${foreign//$'\n'/, }, which not every Linux has"
    glibc=$(readelf --version-info --wide "$@" | grep -o 'GLIBC_2\.[0-9]*' | sort --unique --version-sort | tail -1)
    [[ -n $glibc ]] || die "the programs do not say which glibc they need"
    glibc=${glibc#GLIBC_}
    echo "manylinux_${glibc//./_}_$(uname -m)"
}

# stage_programs FOLDER: copies the programs without debug information into FOLDER/bin and FOLDER/lib/holobiont, and manual
# pages and completions into FOLDER/share.
stage_programs() {
    local program place documents=$1/documents share=$1/share
    mkdir -p "$1"/{bin,lib/holobiont} "$share"/{man,bash-completion,zsh,fish}
    for program in "${all_programs[@]}"; do
        place=lib/holobiont
        [[ " ${typed_programs[*]} " != *" $program "* ]] || place=bin
        objcopy --strip-debug "$target_dir/$profile/$program" "$1/$place/$program"
    done
    make_documents "$documents"
    mv "$documents/man" "$share/man/man1"
    mv "$documents/bash" "$share/bash-completion/completions"
    mv "$documents/zsh" "$share/zsh/site-functions"
    mv "$documents/fish" "$share/fish/vendor_completions.d"
    rmdir "$documents"
}

# stage_cubins FOLDER: puts the machine code of the GPU kernels there, which base-executor looks for beside itself. A debug
# build, which is not for use, gets the explanation alone.
stage_cubins() {
    local folder=$1
    mkdir -p "$folder"
    cat >"$folder/README" <<'END'
Machine code of the GPU kernels, one file for each GPU architecture. A GPU without a file here, and every GPU if the files
are deleted, gets its code from the driver's compiler at the first start, which takes up to half a minute.
END
    [[ $profile == release ]] || return 0
    say "compiling the kernels for GPUs"
    "$root/scripts/cuda-cubins" --out "$folder" >&2
}

# Prints a Python that has pip: python3 itself, or that of a virtual environment made for the purpose.
python_with_pip() {
    local python=$root/.venv/bin/python
    if [[ -x $python ]] && "$python" -m pip --version >/dev/null 2>&1; then
        echo "$python"
    elif python3 -m pip --version >/dev/null 2>&1; then
        echo python3
    else
        make_venv
        echo "$python"
    fi
}

# make_venv [FOLDER]: makes a virtual environment there, by default in .venv, unless it is there.
make_venv() {
    local folder=${1:-$root/.venv}
    if [[ -x $folder/bin/python ]] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    say "making a virtual environment in ${folder##*/}"
    # Debian has venv, and the pip that goes into it, in a package of its own.
    python3 -m venv --clear "$folder" >&2 ||
        die "python3 can make no virtual environment" "apt install python3-venv python3-pip"
}

# install_into FOLDER ARGUMENTS...: has pip install into a virtual environment. Python compiles what it needs of it, when it
# does.
install_into() {
    make_venv "$1" && "$1/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "${@:2}"
}

# The package of PyPI that llama.cpp's source is taken from, for what we are compared with.
llama_cpp_version=0.3.36

# fetch_llama_cpp FOLDER [PATTERN]: unpacks that source, or what of it PATTERN says, there, as vendor/llama.cpp: from PyPI, unless
# HOLOBIONT_PEER_SDIST names the package.
fetch_llama_cpp() {
    local sdist=${HOLOBIONT_PEER_SDIST:-} python
    if [[ -z $sdist ]]; then
        python=$(python_with_pip)
        say "fetching llama-cpp-python $llama_cpp_version"
        "$python" -m pip --quiet --disable-pip-version-check download --no-deps --no-binary llama-cpp-python \
            --dest "$1" "llama-cpp-python==$llama_cpp_version" >&2 ||
            die "pip could not download llama-cpp-python $llama_cpp_version; its message is above" \
                "name a downloaded source package in HOLOBIONT_PEER_SDIST"
        sdist=$1/llama_cpp_python-$llama_cpp_version.tar.gz
    fi
    tar -xzf "$sdist" -C "$1" --strip-components=1 --wildcards "*/vendor/llama.cpp/${2:-*}"
}

# free_port FIRST: the first port of 127.0.0.1 from FIRST on that nobody listens on.
free_port() {
    python3 - "$1" <<'EOF'
import socket, sys
for port in range(int(sys.argv[1]), 65536):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        print(port)
        break
EOF
}

# Fills the array example_adapters with --adapter NAME=DIR for every example.
find_example_adapters() {
    example_adapters=()
    local config
    for config in "$root"/examples/adapters/*/adapter_config.json; do
        [[ -e $config ]] || die "there are no example adapters in examples/adapters" "git checkout examples/adapters"
        config=${config%/adapter_config.json}
        example_adapters+=(--adapter "${config##*/}=$config")
    done
}

# start_deployment PROGRAMS MODEL STATE PORT: starts `holobiont up` with the example adapters and waits until it serves.
# Sets up_pid, url and greeting, the file with what it printed. Stopping it is the caller's.
start_deployment() {
    local programs=$1 model=$2 state=$3 port=$4
    url=http://127.0.0.1:$port
    greeting=$state/greeting.txt
    find_example_adapters
    mkdir -p "$state"
    : >"$greeting"
    HOLOBIONT_SERVED_MODEL_NAME=smollm2-135m "$programs/holobiont" up --model "$model" --state "$state" \
        --listen "127.0.0.1:$port" "${example_adapters[@]}" >"$greeting" &
    up_pid=$!
    until [[ -s $greeting ]]; do
        kill -0 "$up_pid" 2>/dev/null || die "the processes did not start; the reason is above"
        sleep 0.05
    done
}

# stop_deployment: stops what start_deployment started; fails if that did not go well.
stop_deployment() {
    [[ -n ${up_pid:-} ]] || return 0
    local pid=$up_pid
    up_pid=''
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid"
}
