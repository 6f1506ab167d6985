"""Takes Holobiont's programs into the wheel where there are any: `programs`, as scripts/build-wheel lays it out.

maturin packages the programs of one crate, and setuptools no programs at all. Without the folder the wheel is Python alone.
"""

import pathlib

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Programs(BuildHookInterface):
    def initialize(self, version, build_data):
        programs = pathlib.Path(self.root, "programs")
        if not programs.is_dir():
            return
        build_data["shared_scripts"] = {f"programs/bin/{path.name}": path.name for path in (programs / "bin").iterdir()}
        build_data["shared_data"] = {"programs/lib": "lib", "programs/share": "share"}
        build_data["tag"] = f"py3-none-{(programs / 'platform').read_text().strip()}"
        build_data["pure_python"] = False
