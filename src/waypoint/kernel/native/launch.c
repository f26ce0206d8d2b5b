/*
 * launch: the host side of a session's birth. It puts together what Python cannot do safely from a threaded
 * process: private mount namespaces, the overlay, the clone into the session's namespaces, and CRIU's surroundings.
 *
 *   launch new  [overlay options] [session options] -- INIT [ARG...]   starts PID 1; prints its host pid
 *   launch criu [overlay options] [criu options] -- CRIU ARG...        becomes CRIU in a private mount namespace
 *   launch template [--kdat FILE] -- CRIU ARG...                       becomes our own CRIU that forks others, each with a mount
 *                                                                      namespace made of the one that this was started in
 *   launch stage [--idmap BASE] -- SOCKET                              mounts overlays for CRIUs that run already: each request is a
 *                                                                      message with overlay options and --enter PID, each ended by
 *                                                                      a zero byte, and a descriptor to which it writes 1, or why not
 *
 * Every mount is made in a private mount namespace: when the session's last process dies the kernel removes them all,
 * whatever happened to the caller. Nothing is ever mounted in the host's namespace.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/filter.h>
#include <linux/if.h>
#include <linux/mount.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_LOWER 500
#define MAX_MASK 64
#define MAX_CGROUP 16
#define MAX_BASE 128
#define ID_RANGE 268435456u
#define MAX_WORDS 2048
#define STAGES 2
#define STAGE "/run/root"	/* where a root is put together, on a private tmpfs that every user may walk through */

static const char *lower[MAX_LOWER], *cgroup[MAX_CGROUP], *mask[MAX_MASK], *readonly[MAX_MASK];
static int n_lower, n_cgroup, n_mask, n_readonly;
static const char *layers_dir, *base[MAX_BASE], *upper, *work, *hostname = "waypoint", *network = "none", *kdat, *seccomp_file;
#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

static int enter_pid, n_base, merge;
static unsigned idmap;
static uint64_t caps = ~0ULL;

static void die(const char *format, ...)
{
	int saved = errno;
	va_list ap;

	va_start(ap, format);
	vfprintf(stderr, format, ap);
	va_end(ap);
	fprintf(stderr, ": %s\n", strerror(saved));
	exit(125);
}

static int write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t done;

	if (fd < 0)
		return -1;
	done = write(fd, text, strlen(text));
	close(fd);
	return done == (ssize_t)strlen(text) ? 0 : -1;
}

#include "overlay.h"

/* ------------------------------------------------------------------ session */

static void loopback_up(void)
{
	struct ifreq ifr = { .ifr_name = "lo", .ifr_flags = IFF_UP };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &ifr))
		die("bringing up lo");
	close(fd);
}

static void join_cgroups(void)
{
	char path[4096];

	for (int i = 0; i < n_cgroup; i++) {
		snprintf(path, sizeof(path), "%s/cgroup.procs", cgroup[i]);
		if (write_file(path, "0"))
			die("joining cgroup %s", cgroup[i]);
	}
}

static void private_mounts(void)
{
	if (unshare(CLONE_NEWNS))
		die("unshare mount namespace");
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		die("making mounts private");
	if (mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m") || mkdir(STAGE, 0755))
		die("mounting a tmpfs on /run");
}

static void bind_readonly(const char *path)
{
	struct stat st;

	if (stat(path, &st))
		return;
	if (mount(path, path, NULL, MS_BIND | MS_REC, NULL) ||
	    mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		die("making %s read-only", path);
}

/* Never a tmpfs: CRIU starts a tar for each. The empty directory is the session's own, so nothing points outside. */
static void mask_path(const char *path)
{
	struct stat st;

	if (stat(path, &st))
		return;
	if (mount(S_ISDIR(st.st_mode) ? ".waypoint/empty" : "dev/null", path, NULL, MS_BIND, NULL) ||
	    (S_ISDIR(st.st_mode) && mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL)))
		die("masking %s", path);
}

static void drop_capabilities(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	for (int c = 0; c < 64; c++)
		if (!(caps >> c & 1) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0) && errno != EINVAL)
			die("dropping capability %d", c);
	if (syscall(SYS_capget, &header, data))
		die("capget");
	for (int i = 0; i < 2; i++) {
		uint32_t part = caps >> (32 * i);
		data[i].permitted &= part;
		data[i].effective &= part;
		data[i].inheritable = 0;
	}
	if (syscall(SYS_capset, &header, data))
		die("capset");
}

static void load_seccomp(const char *file)
{
	static struct sock_filter filter[8192];
	struct sock_fprog prog = { .filter = filter };
	int fd = open(file, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, filter, sizeof(filter));

	if (n <= 0 || n % sizeof(filter[0]))
		die("reading seccomp program %s", file);
	prog.len = n / sizeof(filter[0]);
	close(fd);
	/* loaded while CAP_SYS_ADMIN is still there, so no_new_privs stays off and su and sudo work inside */
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog))
		die("loading the seccomp filter");
}

static int seccomp_fd_file(char *path, size_t size)
{
	int fd;

	if (!seccomp_file)
		return -1;
	fd = open(seccomp_file, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		die("opening %s", seccomp_file);
	snprintf(path, size, "/proc/self/fd/%d", fd);
	return fd;
}

static void become_init(int go, char **argv)
{
	char byte, filter_path[64];
	int filter = seccomp_fd_file(filter_path, sizeof(filter_path));

	if (read(go, &byte, 1) != 1)
		_exit(125);
	close(go);
	if (setresgid(0, 0, 0) || setresuid(0, 0, 0) || setgroups(0, NULL))
		die("becoming root of the session");
	if (mount(STAGE, STAGE, NULL, MS_BIND | MS_REC, NULL) || chdir(STAGE))
		die("binding the root");
	if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		die("mounting /proc");
	if (mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"))
		die("mounting /dev/pts");
	if (mount("mqueue", "dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		die("mounting /dev/mqueue");
	/* sysfs shows a net namespace, so it can be had only where that namespace is the session's own */
	if (strcmp(network, "host") && mount("sysfs", "sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		die("mounting /sys");
	for (int i = 0; i < n_readonly; i++)
		bind_readonly(readonly[i]);
	for (int i = 0; i < n_mask; i++)
		mask_path(mask[i]);
	if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
		die("pivot_root");
	if (sethostname(hostname, strlen(hostname)))
		die("sethostname");
	if (strcmp(network, "host"))
		loopback_up();
	setsid();
	umask(022);
	if (filter >= 0)
		load_seccomp(filter_path);
	drop_capabilities();
	/* nothing of the caller's may be inherited: a stray descriptor would make every later dump fail */
	int null = open("/dev/null", O_RDWR);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0)
		die("/dev/null");
	if (syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_CLOEXEC))
		die("close_range");
	execv(argv[0], argv);
	die("exec %s", argv[0]);
}

static void reset_signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	for (int s = 1; s < 32; s++)
		signal(s, SIG_DFL);
}

/* What becomes of this process, and all that it forks, may share equal pages with whoever allows it too (KSM). */
static void allow_merging(void)
{
	if (merge && prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0))
		die("PR_SET_MEMORY_MERGE");
}

static int new_session(char **argv)
{
	int go[2], flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | SIGCHLD;
	char path[64], map[64];
	struct { uint64_t flags, rest[10]; } args = { 0 };
	pid_t pid;

	if (strcmp(network, "host"))
		flags |= CLONE_NEWNET;
	allow_merging();
	join_cgroups();
	private_mounts();
	attach_overlay(make_overlay());
	if (pipe2(go, O_CLOEXEC))
		die("pipe");
	args.flags = flags & ~0xff;
	args.rest[3] = SIGCHLD;
	pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid < 0)
		die("clone into new namespaces");
	if (pid == 0) {
		close(go[1]);
		become_init(go[0], argv);
	}
	close(go[0]);
	snprintf(map, sizeof(map), "0 %u %u\n", idmap, idmap ? ID_RANGE : 4294967295u);
	for (int g = 0; g < 2; g++) {
		snprintf(path, sizeof(path), "/proc/%d/%cid_map", pid, g ? 'g' : 'u');
		if (write_file(path, map))
			die("writing %s", path);
	}
	printf("%d\n", pid);
	fflush(stdout);
	if (write(go[1], "x", 1) != 1)
		die("starting init");
	return 0;
}

/* --------------------------------------------------------------------- criu */

static void copy(const char *from, const char *to)
{
	char buffer[16384];
	int in = open(from, O_RDONLY | O_CLOEXEC), out;
	ssize_t n;

	if (in < 0)
		return;
	out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	while (out >= 0 && (n = read(in, buffer, sizeof(buffer))) > 0)
		if (write(out, buffer, n) != n)
			die("copying %s", from);
	close(out);
	close(in);
}

static void enter(int pid, const char *name, int flag)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || setns(fd, flag))
		die("entering %s", path);
	close(fd);
}

/* What CRIU keeps of the kernel it looks for on a tmpfs: there it is, and then CRIU goes back. */
static void leave_way_back(void)
{
	char number[16];
	int fd = open("/proc/self/ns/mnt", O_RDONLY);

	if (fd < 0)
		die("opening /proc/self/ns/mnt");
	snprintf(number, sizeof(number), "%d", fd);
	if (setenv("WAYPOINT_TEMPLATE", number, 1))
		die("setenv");
}

static int become_criu(char **argv, int template)
{
	if (template)
		leave_way_back();
	allow_merging();
	join_cgroups();
	private_mounts();
	if (upper)
		attach_overlay(make_overlay());
	if (enter_pid) {
		enter(enter_pid, "cgroup", CLONE_NEWCGROUP);
		if (strcmp(network, "host"))
			enter(enter_pid, "net", CLONE_NEWNET);
	} else if (!template && unshare(CLONE_NEWCGROUP)) {
		die("unshare cgroup namespace");
	}
	/* CRIU keeps what it learnt about the kernel in /run/criu.kdat, but only on a tmpfs; without it every start costs 60 ms */
	if (kdat)
		copy(kdat, "/run/criu.kdat");
	if (chdir("/"))
		die("chdir /");
	execv(argv[0], argv);
	die("exec %s", argv[0]);
	return 125;
}

static const char *value(char **argv, int *i)
{
	if (!argv[*i + 1]) {
		fprintf(stderr, "launch: %s wants a value\n", argv[*i]);
		exit(2);
	}
	return argv[++*i];
}

/* Returns where the options end; -1 if one is not known. */
static int options(char **argv, int i)
{
	for (; argv[i] && strcmp(argv[i], "--"); i++) {
		const char *option = argv[i];
		if (!strcmp(option, "--layers")) layers_dir = value(argv, &i);
		else if (!strcmp(option, "--lower") && n_lower < MAX_LOWER) lower[n_lower++] = value(argv, &i);
		else if (!strcmp(option, "--base") && n_base < MAX_BASE) base[n_base++] = value(argv, &i);
		else if (!strcmp(option, "--idmap")) idmap = strtoul(value(argv, &i), NULL, 10);
		else if (!strcmp(option, "--upper")) upper = value(argv, &i);
		else if (!strcmp(option, "--work")) work = value(argv, &i);
		else if (!strcmp(option, "--hostname")) hostname = value(argv, &i);
		else if (!strcmp(option, "--network")) network = value(argv, &i);
		else if (!strcmp(option, "--cgroup") && n_cgroup < MAX_CGROUP) cgroup[n_cgroup++] = value(argv, &i);
		else if (!strcmp(option, "--mask") && n_mask < MAX_MASK) mask[n_mask++] = value(argv, &i);
		else if (!strcmp(option, "--readonly") && n_readonly < MAX_MASK) readonly[n_readonly++] = value(argv, &i);
		else if (!strcmp(option, "--caps")) caps = strtoull(value(argv, &i), NULL, 16);
		else if (!strcmp(option, "--seccomp")) seccomp_file = value(argv, &i);
		else if (!strcmp(option, "--kdat")) kdat = value(argv, &i);
		else if (!strcmp(option, "--merge")) merge = 1;
		else if (!strcmp(option, "--enter")) enter_pid = atoi(value(argv, &i));
		else {
			fprintf(stderr, "launch: unknown option %s\n", option);
			return -1;
		}
	}
	return i;
}

/* Never in the host's own mount namespace: a CRIU that has not left it yet is not ready for a root. */
static void stage(void)
{
	struct stat ours, theirs;
	char path[64];
	int mount_fd;

	snprintf(path, sizeof(path), "/proc/%d/ns/mnt", enter_pid);
	if (stat("/proc/self/ns/mnt", &ours) || stat(path, &theirs))
		die("looking at %s", path);
	if (ours.st_ino == theirs.st_ino) {
		errno = EAGAIN;
		die("process %d has no mount namespace of its own", enter_pid);
	}
	mount_fd = make_overlay(); /* of what is mounted now: that namespace may have been made a while ago */
	enter(enter_pid, "mnt", CLONE_NEWNS);
	attach_overlay(mount_fd);
}

static int read_request(int sk, char *text, size_t size, int *answer)
{
	char room[CMSG_SPACE(sizeof(int))];
	struct iovec said = { text, size - 1 };
	struct msghdr message = { .msg_iov = &said, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *head;
	ssize_t n;

	do {
		n = recvmsg(sk, &message, MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	head = CMSG_FIRSTHDR(&message);
	if (n <= 0 || !head || head->cmsg_type != SCM_RIGHTS)
		return 0;
	memcpy(answer, CMSG_DATA(head), sizeof(*answer));
	return message.msg_flags & MSG_TRUNC ? 0 : n;
}

#define NOBODY_ASKS 3

static int serve_one(int sk)
{
	static char text[1 << 18], *words[MAX_WORDS + 1];
	int answer, count = 0, size = read_request(sk, text, sizeof(text), &answer);

	if (size <= 0)
		return NOBODY_ASKS;
	dup2(answer, STDERR_FILENO);
	for (char *at = text; at < text + size; at += strlen(at) + 1) {
		if (count == MAX_WORDS)
			return 2;
		words[count++] = at;
	}
	if (options(words, 0) != count || !enter_pid || !upper) {
		fprintf(stderr, "launch: not a request\n");
		return 2;
	}
	stage();
	return write(answer, "1", 1) != 1;
}

/* A child for each request, which enters a mount namespace and does not come back; as many wait as can work at once. */
static int serve_stages(int sk)
{
	int waiting = 0, status = 0;

	if (idmap)
		ready_namespace = idmap_namespace(), ready_idmap = idmap;
	idmap = 0;
	do {
		pid_t pid = fork();

		if (pid < 0)
			die("fork");
		if (pid == 0)
			return serve_one(sk);
		if (++waiting == STAGES)
			waiting -= wait(&status) > 0;
	} while (waiting < STAGES && !(WIFEXITED(status) && WEXITSTATUS(status) == NOBODY_ASKS));
	return 0; /* who else waits finds that out by himself */
}

int main(int argc, char **argv)
{
	int i;

	if (argc < 2 || (i = options(argv, 2)) < 0)
		return 2;
	reset_signals();
	if (!argv[i] || !argv[i + 1])
		return 2;
	if (!strcmp(argv[1], "stage"))
		return serve_stages(atoi(argv[i + 1]));
	if (!strcmp(argv[1], "new"))
		return new_session(argv + i + 1);
	if (!strcmp(argv[1], "criu") || !strcmp(argv[1], "template"))
		return become_criu(argv + i + 1, argv[1][0] == 't');
	return 2;
}
