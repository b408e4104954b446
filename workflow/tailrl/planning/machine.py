"""A machine for the plan: its data-sheet throughputs, and the share of them that a step reaches."""

import re
from pathlib import Path

from pydantic import Field, ValidationError

from tailrl.config.base import Settings
from tailrl.config.load import read_yaml
from tailrl.config.messages import sentences
from tailrl.config.policy import lies
from tailrl.runtime.errors import ConfigurationError, one_line

_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(GB|GiB)")


class Machine(Settings):
    """Throughputs and sizes of one device; the defaults are an H100 SXM's.

    `memory`, `matmul` and `bandwidth` are from its data sheet. The others are assumed: none has been measured.
    """

    name: str = Field("H100 SXM", description="what it is")
    gpu: bool = Field(True, description="whether it is a GPU: sharded training, fused log-probs, bfloat16 without loss")
    memory: float = Field(80e9, gt=0, description="bytes of a device")
    matmul: float = Field(989e12, gt=0, description="floating-point operations per second of large products")
    bandwidth: float = Field(3.35e12, gt=0, description="bytes per second to and from the device's memory")
    decode_matmul: float | None = Field(
        None, gt=0, description="the same of products with as many rows as sequences are in flight; null: matmul"
    )
    train_share: float = Field(0.4, gt=0, description="share of matmul that the products of training reach")
    decode_share: float = Field(0.5, gt=0, description="share of decode_matmul that those of sampling reach")
    passes: float = Field(
        6.0, ge=0, description="times that what training keeps of the forward is read or written besides by products"
    )
    launch: float = Field(2e-5, ge=0, description="seconds a layer takes for a token, however few sequences there are")
    draw: float = Field(1e-11, ge=0, description="seconds per logit to choose a token")
    link: float = Field(3e11, gt=0, description="bytes per second between devices of one machine")
    reserve: float = Field(5e9, ge=0, description="bytes that are taken whatever the sizes: libraries, captured graphs")
    slack: float = Field(1.2, ge=1, description="bytes that the allocator holds for each byte of activations")
    in_flight: int = Field(128, ge=1, description="sequences that an engine has in flight")


def machines() -> dict[str, Machine]:
    """The machines of machines.yaml by name."""
    listed = read_yaml(Path(__file__).with_name("machines.yaml"))
    return {str(name): Machine.model_validate(fields) for name, fields in listed.items()}


def read_machine(given: str | None, memory: str | None) -> Machine:
    """A machine by its name or from a YAML file, with another memory where one is given.

    Args:
        given: a name of machines.yaml, or a file with fields of `Machine`; what it leaves out is the H100's. None for
            that one.
        memory: as `80GB` (10^9 bytes) or `80GiB` (2^30); None for the machine's. The speed stays the machine's.

    Raises:
        StudyError: there is no such machine, or the file or the memory cannot be read.
    """
    named = machines()
    if given is None or given.lower() in named:
        data = {} if given is None else named[given.lower()].model_dump()
    elif not lies(Path.exists, Path(given)):
        raise ConfigurationError(f"--machine {one_line(given)}: no file, and none of {', '.join(named)}")
    else:
        data = {"name": f"the machine of {given}", **read_yaml(Path(given))}
    if memory is not None:
        match = _MEMORY.fullmatch(memory)
        if match is None:
            raise ConfigurationError(f"--memory {one_line(memory)}: write it as 80GB or 80GiB")
        data["memory"] = float(match[1]) * (1e9 if match[2] == "GB" else 2**30)
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError(f"{given or 'machine'}: {sentences(error, Machine)}") from None
