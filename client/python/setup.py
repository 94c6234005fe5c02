"""Builds statetap.v1 from the repository's .proto files; pyproject.toml says the rest."""
import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"


class BuildWithProto(build_py):
    def run(self):
        # An editable installation imports from the source folder.
        out = pathlib.Path(__file__).resolve().parent if self.editable_mode else pathlib.Path(self.build_lib)
        super().run()
        generate(out)


def generate(out: pathlib.Path) -> None:
    from grpc_tools import protoc

    files = sorted((PROTO / "statetap/v1").glob("*.proto"))
    if not files:
        raise SystemExit(f"no .proto files in {PROTO}: install from a checkout of the repository (pip install ./client/python)")
    out.mkdir(parents=True, exist_ok=True)
    options = [f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *options, *map(str, files)]) != 0:
        raise SystemExit("the .proto files do not compile")
    (out / "statetap/v1/__init__.py").write_text('"""The gRPC contract; the comments of the .proto files are its reference."""\n')


setup(cmdclass={"build_py": BuildWithProto})
