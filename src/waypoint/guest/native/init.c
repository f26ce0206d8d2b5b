/*
 * init: PID 1 of a session. It holds both ends of the terminal and every pipe that a command writes to, starts and
 * restarts the persistent shell, reaps orphans, and serves a unix socket. Everything lies inside the tree, so a snapshot
 * needs nothing from outside: clients are dropped first (F_QUIESCE) and find their command again by id and offset.
 *
 *   init SHELL USER WORKDIR TAG    SHELL: its path; TAG: the store's mark; the environment is the session's
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>

#include "spool.h"
#include "users.h"
#include "wire.h"

#define DIR "/.waypoint/run"
#define MAX_CLIENTS 256
#define MAX_COMMANDS 512
#define MAX_PATH 4096
#define KEEP_DONE 64
#define GRACE_TICKS 30
#define TICK_MS 100
#define PATIENCE_MS 2

enum { EXEC, RUN };
enum { QUEUED, RUNNING, DONE };

struct command {
	uint32_t id;
	int kind, state, flags, fifo;
	pid_t pid;			/* RUN: the child */
	int status, exited, shell_died;
	struct spool out[2];
	int in;				/* write end of stdin, -1 when closed */
	char *pending;			/* stdin not yet written, or the text of a queued exec */
	size_t n_pending;
	int in_closing, started;
	uint64_t received, taken, told;	/* stdin: offsets of what came, what the pipe took, what the client knows of that */
	int client;			/* index of the follower, -1 when nobody */
	uint64_t sent[2], lost[2];
	int quiet[2];			/* no writer just now: not polled until the next tick */
	int patient;			/* one of ours: a shell writes line by line, and nobody wants the first before the last */
	int left[2];			/* bytes of its own still in the pipes when it ended */
	int grace;			/* ticks left in which an absent follower is waited for */
	int ending;			/* ticks since F_END, 0 when not asked */
	char *cwd;			/* a copy of its own; a finished command keeps it */
};

struct client {
	int fd, terminal, closing;
	char *in, *out;
	size_t n_in, n_out, at_out;
};

static struct command *commands[MAX_COMMANDS];
static struct client clients[MAX_CLIENTS];
static int n_commands, n_clients;	/* n_clients: so many places have been used at once; the pages of the others are not touched */
static uint32_t next_id = 1, current, last;	/* current: the exec in the shell, 0 when idle; last: the last that anybody asked for */
static int master, slave, bell, ctl, listener;
static pid_t shell_pid;
static int shell_waiting, shell_missing, shell_starts;	/* waiting: it sits in its loop; starts: how often it was started */
static struct user shell_user;
static char *shell_path, *shell_dir, shell_cwd[MAX_PATH];
static struct spool screen = { .fd = -1 }, background = { .fd = -1 };
static char ctl_text[8192];
static size_t n_ctl;

static void on_child(int sig) { (void)sig; }	/* only to wake ppoll */

/* ------------------------------------------------------------------ clients */

static void client_close(int i)
{
	struct client *c = &clients[i];

	if (c->fd < 0)
		return;
	close(c->fd);
	free(c->in);
	free(c->out);
	memset(c, 0, sizeof(*c));
	c->fd = -1;
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->client == i)
			commands[k]->client = -1;
}

static void client_flush(int i)
{
	struct client *c = &clients[i];

	while (c->fd >= 0 && c->at_out < c->n_out) {
		ssize_t n = send(c->fd, c->out + c->at_out, c->n_out - c->at_out, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			client_close(i);
			return;
		}
		c->at_out += n;
	}
	c->at_out = c->n_out = 0;
	if (c->closing)
		client_close(i);
}

static void reply(int i, uint8_t type, uint32_t id, const void *payload, size_t n)
{
	struct client *c = &clients[i];
	struct frame f = { .length = n, .type = type, .id = id };
	char *grown;

	if (i < 0 || c->fd < 0)
		return;
	grown = realloc(c->out, c->n_out + sizeof(f) + n);
	if (!grown)
		_exit(70);
	c->out = grown;
	memcpy(c->out + c->n_out, &f, sizeof(f));
	if (n)
		memcpy(c->out + c->n_out + sizeof(f), payload, n);
	c->n_out += sizeof(f) + n;
	client_flush(i);
}

static void complain(int i, uint32_t id, const char *format, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, format);
	vsnprintf(text, sizeof(text), format, ap);
	va_end(ap);
	reply(i, F_ERROR, id, text, strlen(text));
}

/* ----------------------------------------------------------------- commands */

static struct command *find_command(uint32_t id)
{
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->id == id)
			return commands[k];
	return NULL;
}

static void forget(struct command *c)
{
	for (int k = 0; k < n_commands; k++)
		if (commands[k] == c) {
			memmove(commands + k, commands + k + 1, (n_commands - k - 1) * sizeof(*commands));
			n_commands--;
			break;
		}
	for (int s = 0; s < 2; s++) {
		if (c->out[s].fd >= 0)
			close(c->out[s].fd);
		free(c->out[s].ring);
	}
	if (c->in >= 0)
		close(c->in);
	free(c->pending);
	free(c->cwd);
	free(c);
}

static struct command *new_command(int kind, int flags, int client)
{
	struct command *c, *old = NULL;
	int done = 0;

	for (int k = n_commands - 1; k >= 0; k--)
		if (commands[k]->state == DONE && commands[k]->client < 0 && commands[k]->out[0].fd < 0 &&
		    commands[k]->out[1].fd < 0 && ++done)
			old = commands[k];
	if (old && (done > KEEP_DONE || n_commands == MAX_COMMANDS))
		forget(old);
	if (n_commands == MAX_COMMANDS)
		return NULL;
	c = calloc(1, sizeof(*c));
	if (!c)
		_exit(70);
	c->id = next_id++;
	c->kind = kind;
	c->flags = flags;
	c->client = client;
	c->in = c->out[0].fd = c->out[1].fd = -1;
	commands[n_commands++] = c;
	return c;
}

static void set_cwd(struct command *c, const char *cwd)
{
	char *own = strndup(cwd, MAX_PATH - 1);

	if (!own)
		_exit(70);
	free(c->cwd);
	c->cwd = own;
}

static void finish(struct command *c, int status, int shell_died, const char *cwd)
{
	/* what the command itself wrote is in the pipes by now; what a job of its writes later goes to the background log */
	for (int s = 0; s < 2; s++) {
		c->left[s] = 0;
		if (c->out[s].fd >= 0)
			ioctl(c->out[s].fd, FIONREAD, &c->left[s]);
	}
	c->status = status;
	c->shell_died = shell_died;
	set_cwd(c, cwd);
	c->exited = 1;
	c->ending = c->patient = 0;
	if (c->in >= 0)
		close(c->in);
	c->in = -1;
	free(c->pending);
	c->pending = NULL;
	c->n_pending = 0;
	if (c->kind == EXEC && current == c->id)
		current = 0;
}

/* An exec is over for its client once all that was in the pipes when it ended has been sent. */
static int follower(const struct command *c) { return c->client >= 0 || c->grace; }

static void deliver(struct command *c)
{
	struct { int32_t status; uint8_t died; uint64_t lost[2]; char cwd[MAX_PATH]; } __attribute__((packed)) end;

	for (int s = 0; s < 2; s++) {
		if (c->sent[s] < c->out[s].start) {
			c->lost[s] += c->out[s].start - c->sent[s];
			c->sent[s] = c->out[s].start;
		}
		while (c->client >= 0 && c->sent[s] < c->out[s].end && clients[c->client].n_out < (128 << 10)) {
			size_t n = spool_get(&c->out[s], c->sent[s], scratch + 8, sizeof(scratch) - 8);
			memcpy(scratch, &c->sent[s], 8);
			c->sent[s] += n;
			reply(c->client, s ? F_STDERR : F_STDOUT, c->id, scratch, n + 8);
		}
	}
	if (c->client < 0 || c->state != DONE || c->sent[0] < c->out[0].end || c->sent[1] < c->out[1].end)
		return;
	end.status = c->status;
	end.died = c->shell_died;
	memcpy(end.lost, c->lost, sizeof(end.lost));
	size_t n = strlen(c->cwd);
	memcpy(end.cwd, c->cwd, n);
	int i = c->client;
	c->client = -1;
	reply(i, F_DONE, c->id, &end, sizeof(end) - sizeof(end.cwd) + n);
}

static void tell_taken(struct command *c)
{
	uint64_t both[2] = { c->received, c->in < 0 ? UINT64_MAX : c->taken };

	c->told = c->taken;
	reply(c->client, F_TAKEN, c->id, both, sizeof(both));
}

#include "shell.h"
#include "terminal.h"
#include "serve.h"

/* --------------------------------------------------------------------- loop */

static void reap(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		if (pid == shell_pid)
			shell_died(code);
		for (int k = 0; k < n_commands; k++)
			if (commands[k]->kind == RUN && commands[k]->pid == pid && commands[k]->state == RUNNING) {
				finish(commands[k], code, 0, commands[k]->cwd);
				commands[k]->pid = 0;
			}
	}
}

static void pump_input(struct command *c)
{
	while (c->in >= 0 && c->n_pending && c->state == RUNNING) {
		ssize_t n = write(c->in, c->pending, c->n_pending);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			break;
		if (n < 0) {		/* nobody reads it any more */
			close(c->in);
			c->in = -1;
			c->n_pending = 0;
			tell_taken(c);
			return;
		}
		memmove(c->pending, c->pending + n, c->n_pending - n);
		c->n_pending -= n;
		c->taken += n;
	}
	if (!c->n_pending) {
		free(c->pending);
		c->pending = NULL;
	}
	if (c->taken - c->told >= (64 << 10) && c->client >= 0)
		tell_taken(c);
	/* a FIFO closed before the shell has opened it would lose its content */
	if (c->in >= 0 && c->in_closing && !c->n_pending && c->started) {
		close(c->in);
		c->in = -1;
	}
}

static void pump_output(struct command *c)
{
	for (int s = 0; s < 2; s++) {
		struct spool *o = &c->out[s];
		if (o->fd < 0)
			continue;
		if (c->state == DONE) {		/* into the log, so that the command's own output stays what it was */
			if (spool_fill(&background, o->fd, RING) < 0) {
				close(o->fd);
				o->fd = -1;
			}
			continue;
		}
		size_t room = spool_room(o, follower(c) ? c->sent[s] : o->end);
		uint64_t before = o->end;
		if (c->exited && room > (size_t)c->left[s])
			room = c->left[s];
		int got = spool_fill(o, o->fd, room);
		if (c->exited)
			c->left[s] = got < 0 ? 0 : c->left[s] - (int)(o->end - before);
		if (got < 0 && room && (c->kind == RUN || c->exited)) {
			close(o->fd);
			o->fd = -1;
		} else if (got < 0 && room) {
			c->quiet[s] = 1;
		}
	}
	if (c->exited && c->state == RUNNING && c->left[0] <= 0 && c->left[1] <= 0) {
		c->state = DONE;
		for (int s = 0; s < 2; s++) {
			shrink(c->out[s].fd);	/* a job of its has them open still */
			spool_fit(&c->out[s]);
		}
	}
}

static void tick(void)
{
	signal_late();
	leave_nested();
	for (int k = 0; k < n_commands; k++) {
		struct command *c = commands[k];
		c->quiet[0] = c->quiet[1] = 0;
		if (c->client >= 0)
			c->grace = 0;
		else if (c->grace)
			c->grace--;
		if (c->ending && c->state == RUNNING)
			end_command(c);
	}
	if (shell_missing)
		start_shell();
}

static void loop(void)
{
	static struct pollfd fds[4 + MAX_CLIENTS + 3 * MAX_COMMANDS];
	struct timespec now;
	int64_t last_tick = 0;

	for (;;) {
		int n = 0, busy = late.ticks || shell_missing, patient = 0, ready;
		fds[n++] = (struct pollfd){ listener, POLLIN, 0 };
		fds[n++] = (struct pollfd){ ctl, POLLIN, 0 };
		fds[n++] = (struct pollfd){ master, POLLIN | (n_keys ? POLLOUT : 0), 0 };
		for (int i = 0; i < n_clients; i++)
			if (clients[i].fd >= 0)
				fds[n++] = (struct pollfd){ clients[i].fd, (client_may_send(i) ? POLLIN : 0) | (clients[i].n_out ? POLLOUT : 0), 0 };
		for (int k = 0; k < n_commands; k++) {
			struct command *c = commands[k];
			busy |= c->state == QUEUED || c->quiet[0] || c->quiet[1] || c->grace || c->ending || (c->in_closing && c->in >= 0);
			if (c->state == QUEUED)
				continue;
			patient |= c->patient;
			for (int s = 0; s < 2; s++)
				if (c->out[s].fd >= 0 && !c->quiet[s] && !c->patient &&
				    (c->state == DONE || spool_room(&c->out[s], follower(c) ? c->sent[s] : c->out[s].end)))
					fds[n++] = (struct pollfd){ c->out[s].fd, POLLIN, 0 };
			if (c->in >= 0 && c->n_pending)
				fds[n++] = (struct pollfd){ c->in, POLLOUT, 0 };
		}
		sigset_t none;
		sigemptyset(&none);
		struct timespec wait = { 0, (patient ? PATIENCE_MS : TICK_MS) * 1000000L };
		ready = ppoll(fds, n, busy || patient ? &wait : NULL, &none);
		if (ready < 0 && errno != EINTR)
			_exit(71);
		for (int k = 0; k < n_commands && !ready; k++)
			commands[k]->patient = 0;	/* it takes its time, or writes more than its pipes hold */
		reap();		/* always: ready descriptors keep ppoll from letting the signal in */
		read_terminal();
		read_control();
		serve_clients();	/* before delivering: a flushed client has room again, and nothing else would wake us */
		for (int k = 0; k < n_commands; k++)
			if (commands[k]->state != QUEUED) {
				pump_input(commands[k]);
				pump_output(commands[k]);
				deliver(commands[k]);
			}
		start_next();
		clock_gettime(CLOCK_MONOTONIC, &now);
		int64_t ms = now.tv_sec * 1000 + now.tv_nsec / 1000000;
		if (ms - last_tick >= TICK_MS) {
			last_tick = ms;
			tick();
		}
	}
}

int main(int argc, char **argv)
{
	struct sigaction act = { .sa_handler = on_child, .sa_flags = SA_NOCLDSTOP | SA_RESTART };
	sigset_t block;

	if (argc != 5 || getpid() != 1)
		return 2;
	shell_path = argv[1];
	shell_dir = argv[3];
	if (find_user(argv[2], &shell_user)) {
		fprintf(stderr, "init: no user %s in the session\n", argv[2]);
		return 3;
	}
	sigemptyset(&block);
	sigaddset(&block, SIGCHLD);	/* only ppoll lets it in: no wake-up can be lost */
	sigprocmask(SIG_BLOCK, &block, NULL);
	sigaction(SIGCHLD, &act, NULL);
	signal(SIGPIPE, SIG_IGN);
	/* rings in the heap, not a mapping for each; and fixed, or each bigger buffer that is freed would raise it */
	mallopt(M_MMAP_THRESHOLD, 2 * RING);
	open_everything();
	make_directories(shell_dir);
	start_shell();
	/* the launcher waits for the end of its stderr pipe: from here on all is well */
	dup2(0, 2);
	loop();
}
