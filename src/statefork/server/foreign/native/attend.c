/*
 * The attendant: started inside an environment, it starts one program there, on pipes or on a terminal of its own, and relays
 * between it and whoever holds its standard streams: output, input, size of the terminal, signals, and how it ended. Being a
 * plain program with plain pipes it works on every backend, and what it looks after is snapshotted and forked with it.
 *
 *   attend NAME [-t ROWSxCOLUMNS [-n]] [-i] [-u USER] [-d DIRECTORY] [-h] -- PROGRAM ARGUMENT...
 *   attend NAME -w DIRECTORY [-r]
 *   attend NAME -l PATH -D DEPTH
 *
 * -n: the terminal does not echo. -i: stdin is a pipe, not /dev/null. -h: where no directory is given, begin at the home of
 * USER, or at one's own instead of in /.
 * -w: report what changes in a directory (-r: and below it), until stdin ends.
 * -l: tell of a path (depth 0) or of what is in it, down to a depth.
 */
#define _GNU_SOURCE
#include "entries.h"
#include "frames.h"
#include "watch.h"
#include "who.h"
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>

struct wish {
	const char *name, *user, *directory, *watched, *listed;
	int rows, columns, quiet, fed, homeward, recursive, depth;
	char **argv;
};

static struct buffer out, in, feed;
static int to_child = -1, from[2] = { -1, -1 };	/* its stdin; its stdout (or terminal) and stderr */
static int on_terminal, feed_ends;
static pid_t child;
static volatile sig_atomic_t child_ended;

static void ended(int signal) { (void)signal; child_ended = 1; }

static void fail(const char *what)
{
	char text[1024];
	snprintf(text, sizeof(text), "%d %s: %s", errno, what, strerror(errno));
	say_text(&out, 'f', text);
	flush(&out);
	_exit(0);
}

static void stands_in(const struct wish *w, const struct who *who, int report)
{
	char here[4096];
	const char *home = getenv("HOME");

	if (!home)
		home = who->home;
	if (w->directory) {
		if (chdir(w->directory) < 0) {
			dprintf(report, "%d cwd '%s': %s", errno, w->directory, strerror(errno));
			_exit(127);
		}
	} else if (w->homeward && (w->user || (getcwd(here, sizeof(here)) && strcmp(here, "/") == 0)) && chdir(home) < 0) {
		(void)!chdir("/");
	}
}

static void in_child(const struct wish *w, const struct who *who, int report, int streams[3], const char *terminal)
{
	setsid();
	if (terminal) {
		int fd = open(terminal, O_RDWR);
		struct termios t;
		if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) < 0 || tcgetattr(fd, &t) < 0) {
			dprintf(report, "%d terminal: %s", errno, strerror(errno));
			_exit(127);
		}
		if (w->quiet) {
			t.c_lflag &= ~ECHO;
			tcsetattr(fd, TCSANOW, &t);
		}
		if (who->uid)
			(void)!fchown(fd, who->uid, -1);
		streams[0] = streams[1] = streams[2] = fd;
	}
	for (int n = 0; n < 3; n++)
		dup2(streams[n], n);
	setenv("HOME", who->home, w->user != NULL);
	setenv("USER", who->name, w->user != NULL);
	setenv("LOGNAME", who->name, w->user != NULL);
	setenv("SHELL", who->shell, w->user != NULL);
	setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 0);
	if (w->user && become(who) < 0) {
		dprintf(report, "%d user '%s': %s", errno, w->user, strerror(errno));
		_exit(127);
	}
	stands_in(w, who, report);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);
	execvp(w->argv[0], w->argv);
	if (errno == ENOENT && strcmp(w->argv[0], "/bin/bash") == 0) {	/* small images have only this one; it takes -l -c too */
		w->argv[0] = "/bin/sh";
		execv(w->argv[0], w->argv);
	}
	dprintf(report, "%d %s: %s", errno, w->argv[0], strerror(errno));
	_exit(127);
}

static void start(const struct wish *w)
{
	struct who who;
	int report[2], streams[3], ends[3][2];
	char why[1024], name[64] = "", text[512];
	ssize_t n;

	if (!who_is(w->user, getuid(), &who)) {
		errno = ESRCH;
		snprintf(text, sizeof(text), "no user '%s'", w->user);
		fail(text);
	}
	if (pipe2(report, O_CLOEXEC) < 0)
		fail("pipe");
	if (w->rows) {
		struct winsize size = { .ws_row = w->rows, .ws_col = w->columns };
		int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
		if (master < 0 || grantpt(master) < 0 || unlockpt(master) < 0 || ptsname_r(master, name, sizeof(name)))
			fail("terminal");
		ioctl(master, TIOCSWINSZ, &size);
		to_child = from[0] = master;
		on_terminal = 1;
	} else {
		for (int k = 0; k < 3; k++)
			if (pipe2(ends[k], O_CLOEXEC) < 0)
				fail("pipe");
		streams[0] = w->fed ? ends[0][0] : open("/dev/null", O_RDONLY | O_CLOEXEC);
		streams[1] = ends[1][1], streams[2] = ends[2][1];
		to_child = w->fed ? ends[0][1] : -1;
		from[0] = ends[1][0], from[1] = ends[2][0];
	}
	child = fork();
	if (child < 0)
		fail("fork");
	if (!child)
		in_child(w, &who, report[1], streams, *name ? name : NULL);
	close(report[1]);
	n = read(report[0], why, sizeof(why) - 1);
	close(report[0]);
	if (n > 0) {
		why[n] = 0;
		say_text(&out, 'f', why);
		flush(&out);
		_exit(0);
	}
	if (!w->rows) {
		close(ends[0][0]), close(ends[1][1]), close(ends[2][1]);
		if (!w->fed)
			close(ends[0][1]), close(streams[0]);
	}
	for (int k = 0; k < 2; k++)
		if (from[k] >= 0)
			unblocked(from[k]);
	if (to_child >= 0)
		unblocked(to_child);
	snprintf(text, sizeof(text), "%d %s", child, w->name);
	say_text(&out, 'b', text);
}

static void obey(void)
{
	char kind, *payload, text[64];
	uint32_t n;

	while (hear(&in, &kind, &payload, &n)) {
		snprintf(text, sizeof(text), "%.*s", n < 60 ? (int)n : 60, payload);
		if (kind == 'i' && to_child >= 0) {
			put(&feed, payload, n);
		} else if (kind == 'c' && on_terminal) {
			put(&feed, "\004", 1);
		} else if (kind == 'c') {
			feed_ends = 1;
		} else if (kind == 's') {
			kill(-child, atoi(text));
		} else if (kind == 'r' && on_terminal) {
			struct winsize size = { 0 };
			if (sscanf(text, "%hu %hu", &size.ws_row, &size.ws_col) == 2)
				ioctl(from[0], TIOCSWINSZ, &size);
		}
	}
}

static void feed_child(void)
{
	if (to_child < 0)
		return;
	if (drain(&feed, to_child) < 0 || (feed_ends && !held(&feed))) {
		feed.from = feed.to = 0;
		if (!on_terminal)
			close(to_child);
		to_child = -1;
	}
}

/* Returns 1 if something came. */
static int relay(int k)
{
	static char bytes[32 << 10];
	ssize_t n = read(from[k], bytes, sizeof(bytes));

	if (n > 0) {
		say(&out, on_terminal ? 'p' : k ? 'e' : 'o', bytes, n);
		return 1;
	}
	if (n == 0 || (errno != EAGAIN && errno != EINTR)) {	/* a terminal says EIO when its last user is gone */
		if (!on_terminal || to_child != from[k])
			close(from[k]);
		from[k] = -1;
	}
	return 0;
}

static int hear_more(void)
{
	static char bytes[32 << 10];
	ssize_t n = read(0, bytes, sizeof(bytes));

	if (n > 0)
		put(&in, bytes, n);
	return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

/* What the child left running keeps its output open: somebody has to go on reading it. */
static void stay_behind(void)
{
	if ((from[0] < 0 && from[1] < 0) || fork())
		return;
	setsid();
	for (int fd = 0; fd < 3; fd++) {
		int null = open("/dev/null", O_RDWR);
		dup2(null, fd);
		if (null > 2)
			close(null);
	}
	while (from[0] >= 0 || from[1] >= 0) {
		struct pollfd p[2] = { { .fd = from[0], .events = POLLIN }, { .fd = from[1], .events = POLLIN } };
		poll(p, 2, -1);
		for (int k = 0; k < 2; k++)
			if (from[k] >= 0 && p[k].revents)
				relay(k);
		out.from = out.to = 0;
	}
	_exit(0);
}

static void attend(void)
{
	sigset_t none;
	int listening = 1, status = 0, over = 0;
	char text[64];

	sigemptyset(&none);
	while (!over) {
		int full = held(&out) > FULL;
		struct pollfd p[5] = {
			{ .fd = listening && held(&feed) < (4 << 20) ? 0 : -1, .events = POLLIN },
			{ .fd = held(&out) ? 1 : -1, .events = POLLOUT },
			{ .fd = full ? -1 : from[0], .events = POLLIN },
			{ .fd = full ? -1 : from[1], .events = POLLIN },
			{ .fd = held(&feed) ? to_child : -1, .events = POLLOUT },
		};
		if (!child_ended && ppoll(p, 5, NULL, &none) < 0 && errno != EINTR)
			break;
		if (child_ended) {
			child_ended = 0;
			over = waitpid(child, &status, WNOHANG) == child;
			continue;
		}
		if (p[0].revents) {
			listening = hear_more();
			obey();
			feed_child();
		}
		for (int k = 0; k < 2; k++)
			if (from[k] >= 0 && p[2 + k].revents)
				relay(k);
		if (p[4].revents)
			feed_child();
		if (drain(&out, 1) < 0)
			out.from = out.to = 0;
	}
	for (int k = 0; k < 2; k++)	/* it has ended; all that it wrote is in the pipes by now */
		while (from[k] >= 0 && relay(k))
			if (held(&out) > FULL)
				flush(&out);
	snprintf(text, sizeof(text), "%d %d", WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
	say_text(&out, 'x', text);
	flush(&out);
	stay_behind();
}

int main(int argc, char **argv)
{
	struct wish w = { 0 };
	int option;

	if (argc < 2)
		return 64;
	w.name = argv[1];
	for (optind = 2; (option = getopt(argc, argv, "+t:niu:d:hw:rl:D:")) != -1;) {
		switch (option) {
		case 't': sscanf(optarg, "%dx%d", &w.rows, &w.columns); break;
		case 'n': w.quiet = 1; break;
		case 'i': w.fed = 1; break;
		case 'u': w.user = optarg; break;
		case 'd': w.directory = optarg; break;
		case 'h': w.homeward = 1; break;
		case 'w': w.watched = optarg; break;
		case 'r': w.recursive = 1; break;
		case 'l': w.listed = optarg; break;
		case 'D': w.depth = atoi(optarg); break;
		default: return 64;
		}
	}
	w.argv = argv + optind;
	signal(SIGPIPE, SIG_IGN);
	unblocked(1);
	if (w.watched)
		return watch(&out, w.watched, w.recursive, w.name);
	if (w.listed)
		return entries(&out, w.listed, w.depth);
	if (!*w.argv)
		return 64;
	sigset_t chld;
	struct sigaction action = { .sa_handler = ended };
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, NULL);
	sigaction(SIGCHLD, &action, NULL);
	start(&w);
	attend();
	return 0;
}
