/* Programs and their streams. A channel is one program with three pipes; its output is sent in frames, in a window. */
#ifndef PROGRAMS_H
#define PROGRAMS_H
#include "boot.h"
#include "users.h"
#include "wire.h"
#include <signal.h>
#include <sys/wait.h>

#define MAX_CHANNELS 256
#define OUT_SIZE (1 << 20)
#define OUT_SPARE (1 << 18) /* kept free of output, for answers */

struct channel {
	int used;
	uint16_t id; /* 0: nobody listens */
	pid_t pid;   /* 0: ended */
	int in, out[2];
	uint32_t window;
	int32_t code;
	char *pending;
	uint32_t pending_length;
	int end_pending;
};

static struct channel channels[MAX_CHANNELS];
static pid_t syncing;
static int connection = -1, hung_up;
static char out[OUT_SIZE];
static uint32_t out_start, out_end;

/* -- frames out ------------------------------------------------------------------------------------------------- */

static void flush_out(void)
{
	while (out_start < out_end && connection >= 0) {
		uint32_t length = out_end - out_start;
		ssize_t done = write(connection, out + out_start, length < MAX_PAYLOAD ? length : MAX_PAYLOAD);
		if (done < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		out_start = done > 0 ? out_start + done : out_end;
	}
	out_start = out_end = 0;
}

static uint32_t out_room(void) { return OUT_SIZE - out_end; }

static void send_frame(int kind, uint16_t channel, const void *payload, uint32_t length)
{
	struct frame frame = {kind, 0, channel, length};

	if (sizeof(frame) + length > out_room()) {
		memmove(out, out + out_start, out_end - out_start);
		out_end -= out_start;
		out_start = 0;
	}
	for (int turn = 0; sizeof(frame) + length > out_room(); turn++) {
		struct pollfd one = {connection, POLLOUT, 0};
		poll(&one, 1, 100);
		flush_out();
		if (turn == 50) /* nobody reads at all; whoever comes next says HELLO first */
			out_start = out_end = 0;
	}
	memcpy(out + out_end, &frame, sizeof(frame));
	memcpy(out + out_end + sizeof(frame), payload, length);
	out_end += sizeof(frame) + length;
}

static void send_number(int kind, uint16_t channel, uint32_t number) { send_frame(kind, channel, &number, 4); }

static void send_failure(uint16_t channel, int error, const char *what)
{
	char payload[512];
	uint32_t code = error;

	memcpy(payload, &code, 4);
	send_frame(K_FAILED, channel, payload, 4 + snprintf(payload + 4, sizeof(payload) - 4, "%s", what));
}

/* -- programs --------------------------------------------------------------------------------------------------- */

static struct channel *find(uint16_t id)
{
	for (int i = 0; id && i < MAX_CHANNELS; i++)
		if (channels[i].used && channels[i].id == id)
			return &channels[i];
	return NULL;
}

static void shut(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void forget(struct channel *c)
{
	c->id = 0;
	shut(&c->in);
	free(c->pending);
	c->pending = NULL;
	c->pending_length = 0;
}

static void release_if_over(struct channel *c)
{
	if (!c->pid && !c->id && c->out[0] < 0 && c->out[1] < 0)
		c->used = 0;
}

/* In the child: never returns. What cannot be started is told as a shell would tell it. */
static void become_program(char **argv, char **envp, const struct user *user, const char *cwd, int *pipes, int failure)
{
	sigset_t none;
	int code;

	setsid();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	for (int number = 0; number < 3; number++)
		dup2(pipes[number], number);
	environ = envp;
	if (!getenv("HOME"))
		setenv("HOME", user->home, 1);
	if (become_user(user) || chdir(*cwd ? cwd : "/")) {
		code = errno;
		if (write(failure, &code, sizeof(code)) < 0)
			_exit(125);
		_exit(126);
	}
	close(failure);
	execvp(argv[0], argv);
	code = errno == ENOENT || errno == ENOTDIR ? 127 : 126;
	dprintf(2, "%s: %s\n", argv[0], code == 127 ? "not found" : strerror(errno));
	_exit(code);
}

static int make_pipes(int pipes[8])
{
	for (int i = 0; i < 8; i++)
		pipes[i] = -1;
	for (int i = 0; i < 8; i += 2)
		if (pipe2(pipes + i, O_CLOEXEC))
			return -1;
	return 0;
}

static void spawn(uint16_t id, char *text, uint32_t length)
{
	uint16_t argc, envc;
	struct channel *c = NULL;
	struct user user;
	int pipes[8], inside[3], code;
	char *at = text + 4, *end = text + length;

	for (int i = 0; i < MAX_CHANNELS && !c; i++)
		if (!channels[i].used)
			c = &channels[i];
	if (!c || length < 5 || end[-1] || find(id)) {
		send_failure(id, c ? EINVAL : EAGAIN, "channel");
		return;
	}
	memcpy(&argc, text, 2);
	memcpy(&envc, text + 2, 2);
	char **strings = calloc(argc + envc + 4, sizeof(char *)), **argv = strings + 2, **envp = argv + argc + 1;
	for (int i = 0; strings && i < argc + envc + 2 && at < end; i++, at += strlen(at) + 1)
		strings[i < argc + 2 ? i : i + 1] = at;
	if (!strings || !argc || !strings[1] || !argv[argc - 1] || (envc && !envp[envc - 1])) {
		send_failure(id, EINVAL, "request");
		free(strings);
		return;
	}
	pid_t pid = -1;
	if (find_user(strings[0], &user)) {
		send_failure(id, ENOENT, strings[0]);
	} else if (make_pipes(pipes) || (pid = fork()) < 0) {
		send_failure(id, errno, "fork");
		for (int i = 0; i < 8; i++)
			shut(&pipes[i]);
	}
	if (pid < 0) {
		free(strings);
		return;
	}
	inside[0] = pipes[0], inside[1] = pipes[3], inside[2] = pipes[5];
	if (!pid)
		become_program(argv, envp, &user, strings[1], inside, pipes[7]);
	shut(&pipes[0]), shut(&pipes[3]), shut(&pipes[5]), shut(&pipes[7]);
	*c = (struct channel){.used = 1, .id = id, .pid = pid, .in = pipes[1], .out = {pipes[2], pipes[4]}, .window = WINDOW};
	for (int i = 1; i < 5; i++)
		if (i != 3)
			fcntl(pipes[i], F_SETFL, O_NONBLOCK);
	if (read(pipes[6], &code, sizeof(code)) == sizeof(code)) { /* ends at execve, within microseconds */
		send_failure(id, code, strings[1]);
		forget(c);
		shut(&c->out[0]), shut(&c->out[1]);
	} else {
		send_number(K_STARTED, id, pid);
	}
	shut(&pipes[6]);
	free(strings);
}

static void feed(struct channel *c)
{
	while (c->in >= 0 && c->pending_length) {
		ssize_t done = write(c->in, c->pending, c->pending_length);
		if (done < 0 && errno == EAGAIN)
			return;
		if (done <= 0) { /* it reads no more: take what comes, and drop it */
			shut(&c->in);
			done = c->pending_length;
		}
		c->pending_length -= done;
		memmove(c->pending, c->pending + done, c->pending_length);
		send_number(K_GRANT, c->id, done);
	}
	if (c->end_pending && !c->pending_length)
		shut(&c->in);
}

static void take_stdin(struct channel *c, const char *data, uint32_t length)
{
	char *larger = c->in < 0 ? NULL : realloc(c->pending, c->pending_length + length);

	if (!larger) {
		send_number(K_GRANT, c->id, length);
		return;
	}
	c->pending = larger;
	memcpy(c->pending + c->pending_length, data, length);
	c->pending_length += length;
	feed(c);
}

/* Output of a channel that nobody listens to is read and dropped: its program must not block. */
static void carry(struct channel *c, int which)
{
	static char buffer[MAX_PAYLOAD];
	int heard = c->id && !hung_up;
	uint32_t room = heard && c->window < sizeof(buffer) ? c->window : sizeof(buffer);
	ssize_t got = read(c->out[which], buffer, room);

	if (got > 0 && heard) {
		c->window -= got;
		send_frame(which ? K_STDERR : K_STDOUT, c->id, buffer, got);
	} else if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
		shut(&c->out[which]);
	}
}

/* The program has ended; what it wrote before that has to be on its way before the exit code is. Children of it that
 * keep the pipes open are no reason to wait: their later output is dropped. */
static void finish(struct channel *c)
{
	for (int which = 0; which < 2; which++)
		while (c->id && c->out[which] >= 0) {
			struct pollfd one = {c->out[which], POLLIN, 0};
			if (poll(&one, 1, 0) < 1)
				break;
			if (!hung_up && (!c->window || out_room() < OUT_SPARE))
				return; /* the loop comes back here */
			carry(c, which);
		}
	if (c->id) {
		send_number(K_EXIT, c->id, c->code);
		forget(c);
	}
	release_if_over(c);
}

static void reap(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == syncing)
			send_frame(K_SYNC, 0, "", syncing = 0);
		for (int i = 0; i < MAX_CHANNELS; i++)
			if (channels[i].used && channels[i].pid == pid) {
				channels[i].pid = 0;
				channels[i].code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
			}
	}
}
#endif
