"""Pods of a Kubernetes job that each start lowtide: pod 0 is the launcher, and all pods join it.

| job | this pod | pods | where pod 0 is |
|---|---|---|---|
| PyTorchJob | RANK, PET_NODE_RANK | PET_NNODES, else WORLD_SIZE | MASTER_ADDR, MASTER_PORT |
| PyTorchJob with elasticPolicy | the number at the end of the pod's name | PET_NNODES (`2:4`) | PET_RDZV_ENDPOINT |
| TrainJob (Kubeflow Trainer 2) | PET_NODE_RANK | PET_NNODES | PET_MASTER_ADDR, PET_MASTER_PORT |
| indexed Job, JobSet | JOB_COMPLETION_INDEX | JOB_COMPLETIONS or --num-hosts | name of pod 0 in the pod's own domain |

RANK and WORLD_SIZE of a PyTorchJob count pods. Since training-operator 1.7 WORLD_SIZE is pods x nprocPerNode, so
PET_NNODES, new in that version, comes first. PET_NPROC_PER_NODE sets the ranks on each pod, unless --nproc does.

Sources: kubeflow/training-operator pkg/controller.v1/pytorch/{envvar,elastic}.go and pull request 1840;
kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go; kubernetes.io, "Job with Pod-to-Pod Communication".
"""

import re
from collections.abc import Callable, Mapping

from ..hosts.host import Allocation, Host, LaunchError, Part, Rendezvous
from .managers import number, rendezvous_port

_LAST_NUMBER = re.compile(r"(.*[-.])?(\d+)")


def find_pod(environ: Mapping[str, str], num_hosts: int | None, full_name: Callable[[], str]) -> Allocation | None:
    """Return this pod's part in its job, or None outside a job.

    num_hosts: of --num-hosts, overrides the environment. full_name: returns this pod's name with its domain, only for
    an indexed Job. Raises LaunchError if the number of pods or the address of pod 0 is unknown.
    """
    # WORLD_SIZE alone is set by many tools; inside a cluster it is the mark of an operator before 1.7.
    if "PET_NNODES" in environ or ("KUBERNETES_SERVICE_HOST" in environ and "WORLD_SIZE" in environ):
        return _kubeflow(environ, num_hosts)
    if "JOB_COMPLETION_INDEX" in environ:
        return _indexed(environ, num_hosts, full_name)
    return None


def _kubeflow(environ: Mapping[str, str], num_hosts: int | None) -> Allocation | None:
    source = "Kubeflow job"
    pods, notes = num_hosts or _num_pods(environ, source), []
    if ":" in environ.get("PET_NNODES", "") and num_hosts is None:
        notes.append(f"PET_NNODES={environ['PET_NNODES']}: waits for all {pods} pods; --num-hosts N starts with fewer")
    endpoint, _, endpoint_port = environ.get("PET_RDZV_ENDPOINT", "").partition(":")
    address = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or endpoint
    if not address:
        raise LaunchError(
            f"{source}: expected the address of pod 0 in MASTER_ADDR, PET_MASTER_ADDR or PET_RDZV_ENDPOINT, found "
            "none. Set MASTER_ADDR in the pods"
        )
    if environ.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1") and _index(environ, source) == 0:
        address = environ.get("HOSTNAME", address)  # older operators tell only the master pod localhost
    identity = f"{source} {environ.get('PET_RDZV_ID') or address}"
    given_port = environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT") or endpoint_port
    port = rendezvous_port(identity, {"MASTER_PORT": given_port} if given_port else {})
    per_pod = environ.get("PET_NPROC_PER_NODE") or environ.get("PET_N_PROC_PER_NODE") or ""
    return _joined(
        f"{source} at {address}",
        Rendezvous(_index(environ, source), address, port, identity),
        _pod_names(address, pods),
        int(per_pod) if per_pod.isdigit() else None,
        notes,
    )


def _num_pods(environ: Mapping[str, str], source: str) -> int:
    if "PET_NNODES" in environ:
        # Of an elastic `2:4` the most: the job then waits for all pods, as the note says.
        most = environ["PET_NNODES"].rpartition(":")[2]
        return number({"PET_NNODES": most}, "PET_NNODES", source)
    return number(environ, "WORLD_SIZE", source)


def _index(environ: Mapping[str, str], source: str) -> int:
    for name in ("PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX"):
        if name in environ:
            return number(environ, name, source)
    match = _LAST_NUMBER.fullmatch(environ.get("HOSTNAME", ""))
    if match is None:
        raise LaunchError(
            f"{source}: expected this pod's number in PET_NODE_RANK, RANK, JOB_COMPLETION_INDEX or at the end of its "
            f'name, found "{environ.get("HOSTNAME", "")}". Set PET_NODE_RANK'
        )
    return int(match[2])


def _indexed(environ: Mapping[str, str], num_hosts: int | None, full_name: Callable[[], str]) -> Allocation:
    index = number(environ, "JOB_COMPLETION_INDEX", "indexed Job")
    if num_hosts is None and "JOB_COMPLETIONS" not in environ:
        raise LaunchError(
            f"indexed Job, pod {index}: the number of pods is unknown (Kubernetes does not tell it). Use --num-hosts "
            "N, or set JOB_COMPLETIONS in the pods"
        )
    pods = num_hosts or number(environ, "JOB_COMPLETIONS", "indexed Job")
    address = environ.get("MASTER_ADDR") or _first_pod(full_name(), index, pods)
    source = f"indexed Job at {address}"
    rendezvous = Rendezvous(index, address, rendezvous_port(source, environ), source)
    return _joined(source, rendezvous, _pod_names(address, pods), None, [])


def _first_pod(full_name: str, index: int, pods: int) -> str:
    """Return pod 0's name: `train-2.workers.default.svc` of pod 2 -> `train-0.workers.default.svc`."""
    name, dot, domain = full_name.partition(".")
    # Without a domain the name has no subdomain, so the name service knows no pod, and no pod could find pod 0.
    if not name.endswith(f"-{index}") or (pods > 1 and not dot):
        raise LaunchError(
            f'indexed Job, pod {index}: expected this pod\'s name as "JOB-{index}.SERVICE", found "{full_name}". Make '
            "a headless service and set it as `subdomain` in the pod template, or set MASTER_ADDR in the pods"
        )
    return f"{name[: -len(str(index))]}0{dot}{domain}"


def _pod_names(address: str, pods: int) -> list[str]:
    """Return names to show, from pod 0's: train-master-0, train-worker-0, ...; x-node-0-0.x, x-node-0-1.x, ..."""
    name, dot, domain = address.partition(".")
    if name.endswith("-master-0"):
        # A PyTorchJob numbers its workers from 0, beside the master.
        workers = name.removesuffix("-master-0") + "-worker-"
        return [address, *(f"{workers}{index}{dot}{domain}" for index in range(pods - 1))]
    if name.endswith("-0"):
        return [f"{name[:-1]}{index}{dot}{domain}" for index in range(pods)]
    return [address, *(f"pod-{index}" for index in range(1, pods))]


def _joined(source: str, rendezvous: Rendezvous, names: list[str], nproc: int | None, notes: list[str]) -> Allocation:
    if rendezvous.index >= len(names):
        raise LaunchError(
            f"{source}: this is pod {rendezvous.index}, but the job has {len(names)}, numbered from 0. "
            "Check --num-hosts"
        )
    hosts = tuple(map(Host, names))
    # A job of a single pod has nobody to join, so it needs no open port.
    if len(hosts) == 1:
        return Allocation(source, "local", hosts, nproc=nproc, notes=tuple(notes))
    part: Part = "agent" if rendezvous.index else "launcher"
    return Allocation(source, "join", hosts, nproc=nproc, notes=tuple(notes), part=part, rendezvous=rendezvous)
