"""The system calls that a session may make: the table behind `seccomp.filter_program`.

It allows what Docker's default profile allows (github.com/moby/profiles, seccomp/default_linux.go, as of 2026: AF_ALG,
AF_VSOCK and io_uring refused, keyctl refused), less `NOT_IN_A_SNAPSHOT`. A name that this host's libseccomp does not
know yet is passed over: the call then answers ENOSYS, and programs take their older way.
"""

from __future__ import annotations

__all__ = [
    "ALLOWED",
    "BY_CAPABILITY",
    "NAMESPACE_FLAGS",
    "NOT_IN_A_SNAPSHOT",
    "PERSONALITIES",
    "REFUSED_SOCKET_FAMILIES",
    "SOCKET_FAMILIES_END",
]

_FILES = """
    access cachestat chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat
    faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32
    fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs
    fstatfs64 fsync ftruncate ftruncate64 futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch
    inotify_init inotify_init1 inotify_rm_watch ioctl lchown lchown32 lgetxattr link linkat listmount listxattr
    listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat
    name_to_handle_at newfstatat open openat openat2 readlink readlinkat removexattr removexattrat rename renameat
    renameat2 rmdir setxattr setxattrat stat stat64 statfs statfs64 statmount statx symlink symlinkat sync
    sync_file_range syncfs truncate truncate64 umask unlink unlinkat utime utimensat utimensat_time64 utimes
"""

_INPUT_OUTPUT = """
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
    eventfd2 io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit _newselect pipe
    pipe2 poll ppoll ppoll_time64 pread64 preadv preadv2 pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read
    readahead readv select sendfile sendfile64 signalfd signalfd4 splice tee vmsplice write writev
"""

_MEMORY = """
    brk get_robust_list madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap mmap2
    mprotect mremap msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_mrelease
    remap_file_pages
"""

_PROCESSES = """
    capget capset execve execveat exit exit_group fork getcpu getegid getegid32 geteuid geteuid32 getgid getgid32
    getgroups getgroups32 getpgid getpgrp getpid getppid getpriority getresgid getresgid32 getresuid getresuid32
    getrlimit getrusage getsid gettid getuid getuid32 ioprio_get ioprio_set kill pause pidfd_open pidfd_send_signal
    prctl prlimit64 process_vm_readv process_vm_writev ptrace restart_syscall rseq rt_sigaction rt_sigpending
    rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam
    sched_setscheduler sched_yield seccomp set_robust_list set_tid_address setfsgid setfsgid32 setfsuid setfsuid32
    setgid setgid32 setgroups setgroups32 setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid
    setresuid32 setreuid setreuid32 setrlimit setsid setuid setuid32 sigaltstack sigprocmask sigreturn sysinfo tgkill
    times tkill ugetrlimit uname uretprobe vfork wait4 waitid waitpid
"""

_MESSAGES = """
    accept accept4 bind connect futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake getpeername
    getsockname getsockopt ipc listen mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64
    mq_timedsend mq_timedsend_time64 mq_unlink msgctl msgget msgrcv msgsnd recv recvfrom recvmmsg recvmmsg_time64
    recvmsg semctl semget semop semtimedop semtimedop_time64 send sendmmsg sendmsg sendto setsockopt shmat shmctl
    shmdt shmget shutdown socketcall socketpair
"""

_TIME_AND_CHANCE = """
    adjtimex alarm clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64
    clock_nanosleep clock_nanosleep_time64 getitimer getrandom gettimeofday nanosleep setitimer time timer_create
    timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create
    timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
"""

_OF_THE_PROCESSOR = """
    arch_prctl arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush get_thread_area modify_ldt riscv_hwprobe
    set_thread_area set_tls sync_file_range2
"""
"""Each exists on some processors only; elsewhere libseccomp leaves it out."""

ALLOWED = frozenset(
    (_FILES + _INPUT_OUTPUT + _MEMORY + _PROCESSES + _MESSAGES + _TIME_AND_CHANCE + _OF_THE_PROCESSOR).split()
)
"""With any arguments. `clone`, `socket` and `personality` are allowed with some: see below."""

NOT_IN_A_SNAPSHOT = frozenset(
    {"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "memfd_secret", "mseal"}
)
"""Docker allows these. CRIU cannot dump a memfd_secret, and drops Landlock rules and seals without a word, so that a
restored program would run on without the protection that it believes to have. They answer ENOSYS, which their callers
expect."""

_OF_THE_ADMINISTRATOR = """
    bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie lsm_get_self_attr lsm_list_modules
    lsm_set_self_attr mount mount_setattr move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname
    sethostname setns syslog umount umount2 unshare
"""

BY_CAPABILITY = {
    "CAP_BPF": frozenset({"bpf"}),
    "CAP_DAC_READ_SEARCH": frozenset({"open_by_handle_at"}),
    "CAP_PERFMON": frozenset({"perf_event_open"}),
    "CAP_SYSLOG": frozenset({"syslog"}),
    "CAP_SYS_ADMIN": frozenset(_OF_THE_ADMINISTRATOR.split()),
    "CAP_SYS_BOOT": frozenset({"reboot"}),
    "CAP_SYS_CHROOT": frozenset({"chroot"}),
    "CAP_SYS_MODULE": frozenset({"delete_module", "finit_module", "init_module"}),
    "CAP_SYS_NICE": frozenset({"get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"}),
    "CAP_SYS_PACCT": frozenset({"acct"}),
    "CAP_SYS_PTRACE": frozenset({"kcmp", "pidfd_getfd", "process_madvise"}),
    "CAP_SYS_RAWIO": frozenset({"ioperm", "iopl"}),
    "CAP_SYS_TIME": frozenset({"clock_settime", "clock_settime64", "settimeofday", "stime"}),
    "CAP_SYS_TTY_CONFIG": frozenset({"vhangup"}),
}
"""Calls that come with a capability."""

NAMESPACE_FLAGS = 0x7E020000
"""`clone` may not have any of CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. `clone3` hides its flags
behind a pointer, so it answers ENOSYS and the C library falls back to `clone`."""

PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, 32-bit machine name, old kernel version, both, and the question which one it is."""

REFUSED_SOCKET_FAMILIES = (
    12,  # AF_DECnet, gone from the kernel
    19,  # AF_ECONET, gone
    20,  # AF_ATMSVC
    23,  # AF_IRDA, gone
    25,  # AF_WANPIPE, gone
    34,  # AF_ISDN
    37,  # AF_CAIF
    38,  # AF_ALG: the kernel's cryptography, of no use here and a way in (CVE-2026-31431)
    40,  # AF_VSOCK: reaches the hypervisor past all network namespaces, and CRIU cannot dump it
)
SOCKET_FAMILIES_END = 46
"""One more than AF_MCTP, the last that Docker allows; 0 is no family."""
