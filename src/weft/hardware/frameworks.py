"""Which frameworks are installed, whether each sees the GPU, and whether they fit each other and the driver.

Standard library alone: every framework is imported in a separate process, all at once, each with a time-out.
The same checks by hand: docs/notes/learn/frameworks.en.md.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weft.hardware.driver import Driver, fitting_build, least_driver, loads
from weft.hardware.findings import Finding, guarded
from weft.hardware.probe import Answer, ask_code


@dataclass(frozen=True)
class Framework:
    """How one framework is asked: ``probe`` calls ``answer(version=…, gpus=…)``; gpus None means "not its business"."""

    name: str
    module: str
    probe: str
    install: str
    needed: bool = False  # weft's own operators stand on it


FRAMEWORKS = (
    Framework(
        "pytorch",
        "torch",
        """
import torch
reason = ""
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not gpus and torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error)
answer(version=torch.__version__, gpus=gpus, cuda=torch.version.cuda, hip=getattr(torch.version, "hip", None),
       architectures=torch.cuda.get_arch_list() if gpus else [], reason=reason)
""",
        "make setup (or: pip install 'weft[gpu]')",
        needed=True,
    ),
    Framework(
        "triton",
        "triton",
        "import triton, triton.language\nanswer(version=triton.__version__)",
        "make setup (or: pip install 'weft[gpu]')",
        needed=True,
    ),
    Framework(
        "tensorflow",
        "tensorflow",
        "import tensorflow as tf\nanswer(version=tf.__version__, gpus=len(tf.config.list_physical_devices('GPU')))",
        "pip install 'tensorflow[and-cuda]'",
    ),
    Framework(
        "jax",
        "jax",
        "import jax\nanswer(version=jax.__version__, gpus=sum(d.platform in ('gpu', 'cuda') for d in jax.devices()))",
        "pip install 'jax[cuda13]' (drivers before 580: 'jax[cuda12]')",
    ),
    Framework(
        "paddlepaddle",
        "paddle",
        "import paddle\ncuda = paddle.is_compiled_with_cuda()\n"
        "answer(version=paddle.__version__, gpus=paddle.device.cuda.device_count() if cuda else 0)",
        "pip install paddlepaddle-gpu (see https://www.paddlepaddle.org.cn/install/quick)",
    ),
    Framework(
        "cupy",
        "cupy",
        """
import cupy
try:
    gpus = cupy.cuda.runtime.getDeviceCount()
except Exception:
    gpus = 0
answer(version=cupy.__version__, gpus=gpus)
""",
        "pip install cupy-cuda13x (drivers before 580: cupy-cuda12x)",
    ),
    Framework(
        "cuda-bindings",
        "cuda.bindings",
        "import cuda.bindings.driver, importlib.metadata\nanswer(version=importlib.metadata.version('cuda-bindings'))",
        "pip install cuda-bindings",
    ),
    Framework(
        "cuda-core",
        "cuda.core",
        "import cuda.core, importlib.metadata\nanswer(version=importlib.metadata.version('cuda-core'))",
        "pip install cuda-core",
    ),
    Framework(
        "nvrtc",
        "cuda.bindings",
        """
from cuda.bindings import nvrtc
code, major, minor = nvrtc.nvrtcVersion()
answer(version=f"{major}.{minor}")
""",
        "pip install 'weft[nvrtc]'",
    ),
)


def installed(module: str) -> bool:
    """Whether a module can be found, without importing it. An empty folder of that name does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None


def ask_frameworks(timeout_s: float) -> dict[str, Answer | None]:
    """Name → what it answered, None where it is not installed. All are asked at once."""
    present = [f for f in FRAMEWORKS if installed(f.module)]
    answers: dict[str, Answer | None] = {f.name: None for f in FRAMEWORKS}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "GLOG_minloglevel": "3"}
    if present:
        with ThreadPoolExecutor(len(present)) as pool:
            replies = {f.name: pool.submit(ask_code, f.probe, timeout_s, **quiet) for f in present}
            answers.update({name: reply.result() for name, reply in replies.items()})
    return answers


def framework_findings(driver: Driver, answers: dict[str, Answer | None]) -> list[Finding]:
    """One finding for each framework, then the mismatches (group ``Fit``)."""
    findings = []
    for framework in FRAMEWORKS:
        findings += guarded(
            framework.name,
            "Frameworks",
            lambda f=framework: _framework(f, driver, answers.get(f.name)),  # type: ignore[misc]
        )
    torch = answers.get("pytorch")
    checks: dict[str, Callable[[], Finding]] = {
        "driver-fits-pytorch": lambda: driver_fits(driver, torch),
        "pytorch-build": lambda: build_fits(driver, torch),
        "gpu-fits-pytorch": lambda: architecture_fits(driver, torch),
        "triton-fits-pytorch": triton_fits,
    }
    return findings + [f for name, check in checks.items() for f in guarded(name, "Fit", check)]


def _framework(framework: Framework, driver: Driver, reply: Answer | None) -> Finding:
    name, group = framework.name, "Frameworks"
    if reply is None:
        if framework.needed:
            return Finding(name, "warn", "not installed: weft's operators need it", framework.install, group)
        return Finding(name, "pass", "not installed", "", group)
    if reply.problem:
        if name == "nvrtc" and "no answer" not in reply.problem:
            return Finding(name, "warn", f"its library does not load: {reply.problem}", framework.install, group)
        command = f'python -c "import {framework.module}"'
        late = "no answer within" in reply.problem
        fix = f"{command}  shows it in full; " + (
            "a cold disk needs longer: weft doctor --level full" if late else f"to reinstall: {framework.install}"
        )
        found = f"installed, but {reply.problem}" if late else f"installed, but does not import: {reply.problem}"
        return Finding(name, "warn", found, fix, group)
    found, gpus = str(reply.value["version"]), reply.value.get("gpus")
    if gpus is None:
        return Finding(name, "pass", found, "", group)
    if gpus:
        return Finding(name, "pass", f"{found}, sees {gpus} GPU{'s' if gpus > 1 else ''}", "", group)
    if driver.gpus and name != "pytorch":  # PyTorch's reasons have findings of their own
        return Finding(name, "warn", f"{found}, sees no GPU", framework.install, group)
    return Finding(name, "pass", f"{found}, sees no GPU", "", group)


# ---- fit


def driver_fits(driver: Driver, torch: Answer | None) -> Finding:
    """``driver-fits-pytorch``: whether the driver loads the CUDA that the installed PyTorch was built with."""
    name, group = "driver-fits-pytorch", "Fit"
    cuda = torch.value.get("cuda") if torch else None
    if not torch or not cuda or not driver.version or driver.module_only:
        return Finding(name, "pass", "nothing to compare", "", group)
    least = least_driver(cuda)
    built = f"driver {driver.version}, PyTorch {torch.value['version']} for CUDA {cuda}"
    if torch.value.get("gpus") or loads(driver.version, cuda):
        # Seeing the GPU outranks the table: data-centre drivers take NVIDIA's forward-compatibility package.
        if torch.value.get("gpus") or not driver.gpus:
            return Finding(name, "pass", built, "", group)
        reason = torch.value.get("reason") or "torch.cuda.is_available() is False"
        fix = 'echo "$CUDA_VISIBLE_DEVICES"; then: python -c "import torch; torch.cuda.init()"'
        return Finding(name, "fail", f"{built}: it fits, yet sees no GPU: {reason}", fix, group)
    capability = driver.gpus[0].capability if driver.gpus else None
    build = fitting_build(driver.version, capability)
    upgrade = f"upgrade the driver to {least} or later"
    if build is None:
        fix = f"{upgrade}: it is too old for every PyTorch that weft supports"
    else:
        index = f"--index-url {build[0]} " if build[0] else ""
        fix = f"pip install {index}'{build[1]}'; or {upgrade}"
    return Finding(name, "fail", f"{built}, which needs driver {least}", fix, group)


def build_fits(driver: Driver, torch: Answer | None) -> Finding:
    """``pytorch-build``: a CPU-only (or AMD) PyTorch on a machine with an NVIDIA GPU leaves the GPU idle."""
    name, group = "pytorch-build", "Fit"
    if not torch or not torch.value:
        return Finding(name, "pass", "nothing to compare", "", group)
    value = torch.value
    built = f"CUDA {value['cuda']}" if value.get("cuda") else ("ROCm" if value.get("hip") else "CPU only")
    if value.get("cuda") or not driver.version or driver.module_only:
        return Finding(name, "pass", built, "", group)
    build = fitting_build(driver.version, driver.gpus[0].capability if driver.gpus else None)
    fix = "upgrade the NVIDIA driver to 580.65.06 or later, then: make setup"
    if build is not None:
        fix = f"pip install --force-reinstall {f'--index-url {build[0]} ' if build[0] else ''}'{build[1]}'"
    return Finding(name, "warn", f"{built}, on a machine with an NVIDIA driver ({driver.version})", fix, group)


def architecture_fits(driver: Driver, torch: Answer | None) -> Finding:
    """``gpu-fits-pytorch``: whether PyTorch's binary holds code for the GPU ("no kernel image is available")."""
    name, group = "gpu-fits-pytorch", "Fit"
    architectures = torch.value.get("architectures", []) if torch else []
    capabilities = sorted({g.capability for g in driver.gpus if g.capability})
    if not architectures or not capabilities or driver.version is None:
        return Finding(name, "pass", "nothing to compare", "", group)
    foreign = [c for c in capabilities if not runs_on(architectures, c)]
    if not foreign:
        return Finding(name, "pass", ", ".join(architectures), "", group)
    build = fitting_build(driver.version, foreign[0])
    fix = "use a GPU of sm_80 or later"
    if build is not None:
        fix = f"pip install --force-reinstall {f'--index-url {build[0]} ' if build[0] else ''}'{build[1]}'"
    missing = ", ".join(f"sm_{major}{minor}" for major, minor in foreign)
    return Finding(name, "fail", f"PyTorch has no code for {missing}, only {', '.join(architectures)}", fix, group)


def runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Machine code runs within its major release on the same minor or later; PTX on everything later."""
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if not found:
            continue
        built = (int(found.group(2)), int(found.group(3)))
        if built <= capability and (found.group(1) == "compute" or built[0] == capability[0]):
            return True
    return False


def pinned_triton(requirements: list[str]) -> str | None:
    """The Triton that PyTorch's metadata requires, from its ``Requires-Dist`` lines."""
    for requirement in requirements:
        found = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([^\s;,)]+)", requirement)
        if found:
            return found.group(1)
    return None


def triton_fits() -> Finding:
    """``triton-fits-pytorch``: each CUDA build of PyTorch is made with one Triton; another may break torch.compile."""
    name, group = "triton-fits-pytorch", "Fit"
    try:
        torch, triton = importlib.metadata.version("torch"), importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "pass", "nothing to compare", "", group)
    wanted = pinned_triton(importlib.metadata.requires("torch") or [])
    if wanted is None:
        return Finding(name, "pass", f"PyTorch {torch} pins no Triton; {triton} is installed", "", group)
    if wanted.split("+")[0] == triton.split("+")[0]:
        return Finding(name, "pass", f"{triton}, as PyTorch {torch} pins", "", group)
    return Finding(
        name, "warn", f"{triton}, but PyTorch {torch} pins {wanted}", f"pip install 'triton=={wanted}'", group
    )
