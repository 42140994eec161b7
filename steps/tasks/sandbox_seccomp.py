"""The system calls that reward code may not make, as a seccomp filter: classic BPF, built here and loaded with ctypes.

What it takes away: other processes (fork, exec, signals, ptrace, reading another's memory), the network, changes of
files' owners, modes and times (Landlock leaves these alone), shared memory, and everything that administers a machine.
A denied call fails with EPERM; a call newer than this table with ENOSYS, for which the C library has an older one.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64) of the Linux sources; BPF
as in Documentation/userspace-api/seccomp_filter.rst. This module imports the standard library only.
"""

import ctypes
import errno
import os
import platform
import struct

# (x86_64, arm64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{"accept": (43, 202), "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424)},
    **{"process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41)},
    **{"mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "open_tree": (428, 428)},
    **{"fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433)},
    **{"mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60)},
    **{"sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266)},
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "mq_open": (240, 180)},
    **{"msgget": (68, 186), "msgsnd": (69, 189), "msgctl": (71, 187)},
    **{"semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192)},
    **{"setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118)},
    **{"sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239)},
    **{"truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
}
# Allowed with the process itself as first argument; the second set also takes 0 for it.
_ON_ITSELF = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_ON_ITSELF |= {"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
_ON_ITSELF_OR_ZERO = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
_CLONE, _SENDTO, _PRCTL = (56, 220), (44, 206), (157, 167)
_CLONE3 = 435
_FIRST_UNKNOWN = 452  # fchmodat2, of Linux 6.6
_X32_BIT = 0x40000000
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_DENY, _UNKNOWN = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_Instruction = tuple[int, int, int, int]
"""(code, instructions to skip if true, if false, operand): struct sock_filter."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_filter() -> None:
    """Load the filter into this process for good; PR_SET_NO_NEW_PRIVS must be set before.

    Raises OSError when the kernel refuses, or the machine's architecture has no table here.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    instructions = _filter(machine, os.getpid())
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter(machine: str, pid: int) -> list[_Instruction]:
    column = list(_AUDIT_ARCHITECTURES).index(machine)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_ABOVE, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _DENY),
        (_JUMP_ABOVE, 0, 1, _FIRST_UNKNOWN),
        (_RETURN, 0, 0, _UNKNOWN),
        *_when(_CLONE3, [(_RETURN, 0, 0, _UNKNOWN)]),  # its flags lie in memory, where a filter can't look
        *_when(_CLONE[column], [_low_half(0), (_JUMP_SET, 0, 1, _CLONE_THREAD), *_verdicts(first=_ALLOW)]),
        *_when(_PRCTL[column], [_low_half(0), (_JUMP_EQUAL, 0, 1, _PR_SET_PDEATHSIG), *_verdicts(first=_DENY)]),
        *_when(_SENDTO[column], _if_null(4)),
    ]
    for numbers in _ON_ITSELF.values():
        program += _when(numbers[column], _if_among(0, [pid]))
    for numbers in _ON_ITSELF_OR_ZERO.values():
        program += _when(numbers[column], _if_among(0, [0, pid]))
    for denied in _DENIED.values():
        number = denied[column]
        if number is not None:
            program += _when(number, [(_RETURN, 0, 0, _DENY)])
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _when(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """`body`, which returns, for this system call; otherwise go on behind it."""
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _verdicts(*, first: int) -> list[_Instruction]:
    """The two ends of a test: `first` where it held, the opposite where it did not."""
    second = _DENY if first == _ALLOW else _ALLOW
    return [(_RETURN, 0, 0, first), (_RETURN, 0, 0, second)]


def _if_among(argument: int, values: list[int]) -> list[_Instruction]:
    tests = [(_JUMP_EQUAL, len(values) - 1 - index, 0, value) for index, value in enumerate(values[:-1])]
    return [_low_half(argument), *tests, (_JUMP_EQUAL, 0, 1, values[-1]), *_verdicts(first=_ALLOW)]


def _if_null(argument: int) -> list[_Instruction]:
    low, high = _low_half(argument), _high_half(argument)
    return [low, (_JUMP_EQUAL, 0, 3, 0), high, (_JUMP_EQUAL, 0, 1, 0), *_verdicts(first=_ALLOW)]


def _low_half(argument: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument  # both architectures are little-endian


def _high_half(argument: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4
