/* A CRIU that was started once, and forks a worker for each dump or restore: to start one takes ten times as long.
 *
 * Whoever has started it asks over a socket (kernel/template.py), with the descriptors of the worker's own socket and of two pipes.
 * The worker is a child of whoever asks, and says who it is when it is ready. Then it is told what it is for: a `struct wanted`,
 * with descriptors that it just keeps; what follows is between CRIU and its caller. Each has a mount namespace of its own,
 * made of that in which this was started, as it is now.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "criu-log.h"
#include "kerndat.h"
#include "cpu.h"
#include "servicefd.h"
#include "util.h"

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

#define MOST_FDS 16

struct wanted {
	int32_t enter; /* the PID 1 whose namespaces it enters for a dump, or 0 */
	uint32_t flags;
};

#define OWN_NETWORK 1 /* that, too */
#define WRITTEN 2     /* see written.c */
#define MERGE 4	      /* what is restored may share equal pages with whoever allows it, too (KSM) */

int serve_template(int sk);
void know_cpus(void); /* cr-restore.c */

enum { SOCKET, ERRORS, BEGUN, FDS };

static void die(const char *what)
{
	dprintf(STDERR_FILENO, "%s: %s\n", what, strerror(errno));
	_exit(125);
}

static void enter(int pid, const char *name, int kind)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || setns(fd, kind))
		die(path);
	close(fd);
}

static void say_who(int sk)
{
	char room[CMSG_SPACE(sizeof(int))] = {};
	int32_t pid = getpid();
	int pidfd = syscall(SYS_pidfd_open, pid, 0);
	struct iovec said = { &pid, sizeof(pid) };
	struct msghdr message = { .msg_iov = &said, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);

	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &pidfd, sizeof(int));
	if (pidfd < 0 || sendmsg(sk, &message, 0) < 0)
		die("saying who it is");
	close(pidfd);
}

/* Returns how many descriptors came with it; -1: nobody asks any more. */
static int receive(int sk, void *said, size_t size, int *fds)
{
	char room[CMSG_SPACE(MOST_FDS * sizeof(int))];
	struct iovec place = { said, size };
	struct msghdr message = { .msg_iov = &place, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *head;
	ssize_t found;
	int count;

	do {
		found = recvmsg(sk, &message, MSG_CMSG_CLOEXEC);
	} while (found < 0 && errno == EINTR);
	head = CMSG_FIRSTHDR(&message);
	if (found != (ssize_t)size)
		return -1;
	if (!head || head->cmsg_type != SCM_RIGHTS)
		return 0;
	count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
	memcpy(fds, CMSG_DATA(head), count * sizeof(int));
	return count;
}

extern char __executable_start, __data_start, end;

/* While nobody waits: what is not mapped here yet, or still our parent's, would be a fault for each page. No harm if it fails. */
static void fetch_pages(void)
{
	const unsigned long page = 4096, heap = 32 * page;
	char *code = (char *)((unsigned long)&__executable_start & -page), *data = (char *)((unsigned long)&__data_start & -page);

	madvise(code, &end - code, MADV_POPULATE_READ);
	madvise(data, &end - data, MADV_POPULATE_WRITE);
	madvise((char *)sbrk(0) - heap, heap, MADV_POPULATE_WRITE);
}

/* What launch.c does for a CRIU that is started by itself */
static int be_worker(const int *fds)
{
	struct wanted wanted;
	int kept[MOST_FDS];
	char begun[16];

	if (dup2(fds[ERRORS], STDERR_FILENO) < 0)
		_exit(125);
	close(fds[ERRORS]);
	snprintf(begun, sizeof(begun), "%d", fds[BEGUN]);
	if (setsid() < 0 || setenv("WAYPOINT_BEGUN", begun, 1))
		die("setsid");
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m") || mkdir("/run/root", 0755))
		die("making a mount namespace");
	fetch_pages();
	know_cpus();
	say_who(fds[SOCKET]);
	if (receive(fds[SOCKET], &wanted, sizeof(wanted), kept) < 0)
		_exit(0);
	if (wanted.flags & MERGE && prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0))
		die("PR_SET_MEMORY_MERGE");
	if (wanted.flags & WRITTEN && setenv("WAYPOINT_WRITTEN", "1", 1))
		die("setenv");
	if (wanted.enter)
		enter(wanted.enter, "cgroup", CLONE_NEWCGROUP);
	else if (unshare(CLONE_NEWCGROUP))
		die("unshare cgroup namespace");
	if (wanted.enter && wanted.flags & OWN_NETWORK)
		enter(wanted.enter, "net", CLONE_NEWNET);
	return fds[SOCKET];
}

int serve_template(int sk)
{
	/* the child is our parent's: it is reaped, and its number is its own, until that wants it no more */
	struct clone_args args = { .flags = CLONE_PARENT };
	const char *mounts = getenv("WAYPOINT_TEMPLATE");
	int fd = mounts ? atoi(mounts) : -1;
	int fds[MOST_FDS];
	char any;

	if (fd < 0)
		return sk;
	/* in a mount namespace of its own, where launch.c has put what CRIU keeps of the kernel */
	if (kerndat_init() || cpu_init())
		exit(1);
	close_proc();
	if (setns(fd, CLONE_NEWNS) || chdir("/"))
		exit(1);
	close(fd);
	for (;;) {
		long pid;

		if (receive(sk, &any, 1, fds) != FDS)
			exit(0);
		pid = syscall(SYS_clone3, &args, sizeof(args));
		if (pid == 0) {
			close(sk);
			return be_worker(fds);
		}
		if (pid < 0)
			dprintf(fds[ERRORS], "fork: %s\n", strerror(errno));
		for (int i = 0; i < FDS; i++)
			close(fds[i]);
	}
}
