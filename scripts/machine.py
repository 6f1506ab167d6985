"""The machine that measures."""

import pathlib
import platform


def machine():
    """The processor's name, its cores, and the instruction sets that decide about speed."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    sets = [name for name in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if name in fields["flags"].split()]
    return {
        "processor": fields["model name"],
        "cores": sum(line.startswith("processor") for line in lines),
        "sets": sets,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }
