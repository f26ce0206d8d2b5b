/* PID 1 of a microVM: brings the root file system up, then starts programs for StateFork and carries their streams.
 *
 * One connection at a time (a virtio-serial port, or a vsock listener), one thread, nothing that blocks. Programs belong
 * to the machine and not to the connection: a new client says HELLO, names the channel that it goes on with (the
 * persistent shell of a revived snapshot), and the programs of all other channels run on with nobody listening.
 */
#define _GNU_SOURCE
#include "programs.h"
#include <linux/fs.h>
#include <linux/random.h>
#include <linux/vm_sockets.h>
#include <sched.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

#define PORT 1024

static int listener = -1;
static char in[sizeof(struct frame) + MAX_PAYLOAD];
static uint32_t in_length;
static char *parts;
static uint32_t parts_length;

/* -- requests --------------------------------------------------------------------------------------------------- */

static void set_clock(uint64_t ns)
{
	struct timespec now = {ns / 1000000000, ns % 1000000000};

	clock_settime(CLOCK_REALTIME, &now);
}

/* Copies of a machine have one random state until something new is mixed in. */
static void mix_in(const char *seed)
{
	struct {
		int bits, size;
		char data[32];
	} pool = {256, 32, {0}};
	int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);

	memcpy(pool.data, seed, sizeof(pool.data));
	if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) || ioctl(fd, RNDRESEEDCRNG))
		say("statefork: random: %s", strerror(errno));
	close(fd);
}

static void hello(const char *payload)
{
	char answer[17];
	uint64_t clock;
	uint16_t keep;

	memcpy(&clock, payload + 16, 8);
	memcpy(&keep, payload + 56, 2);
	set_clock(clock);
	mix_in(payload + 24);
	for (int i = 0; i < MAX_CHANNELS; i++) {
		if (channels[i].used && channels[i].id && channels[i].id != keep)
			forget(&channels[i]);
		channels[i].window = WINDOW;
	}
	parts_length = 0;
	memcpy(answer, payload, 16);
	answer[16] = find(keep) != NULL;
	send_frame(K_HELLO, 0, answer, sizeof(answer));
}

static void list(void)
{
	static char text[MAX_PAYLOAD];
	char path[300];
	uint32_t length = 0;
	DIR *directory = opendir("/proc");

	for (struct dirent *entry; directory && (entry = readdir(directory));) {
		if (!all_digits(entry->d_name) || atoi(entry->d_name) == 1)
			continue;
		snprintf(path, sizeof(path), "/proc/%s/cmdline", entry->d_name);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		ssize_t got = fd < 0 || sizeof(text) - length < 2 ? 0 : read(fd, text + length, sizeof(text) - length - 1);
		close(fd);
		while (got > 0 && !text[length + got - 1])
			got--;
		for (ssize_t i = 0; i < got; i++)
			if (!text[length + i])
				text[length + i] = ' ';
		if (got > 0) { /* kernel threads have none */
			length += got;
			text[length++] = 0;
		}
	}
	if (directory)
		closedir(directory);
	send_frame(K_LIST, 0, text, length);
}

static void freeze(int wanted)
{
	int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), code;

	if (wanted)
		sync();
	code = ioctl(root, wanted ? FIFREEZE : FITHAW, 0) ? errno : 0;
	close(root);
	send_number(K_FREEZE, 0, code);
}

/* In a process of its own: it may take long, and nobody else is to wait for it. The answer comes when that has ended. */
static void begin_sync(void)
{
	syncing = fork();
	if (!syncing) {
		sync();
		_exit(0);
	}
	if (syncing < 0)
		send_frame(K_SYNC, 0, "", 0);
}

static void obey(const struct frame *frame, char *payload)
{
	struct channel *c = find(frame->channel);
	uint32_t number = 0;
	uint64_t clock;

	if (frame->length >= 4)
		memcpy(&number, payload, 4);
	if (frame->kind == K_HELLO && frame->length == 58) {
		hello(payload);
	} else if (frame->kind == K_CLOCK && frame->length == 8) {
		memcpy(&clock, payload, 8);
		set_clock(clock);
	} else if (frame->kind == K_LIST) {
		list();
	} else if (frame->kind == K_SYNC) {
		begin_sync();
	} else if (frame->kind == K_FREEZE && frame->length == 1) {
		freeze(payload[0]);
	} else if (frame->kind == K_PART || frame->kind == K_SPAWN) {
		char *larger = realloc(parts, parts_length + frame->length);
		if (!larger) {
			send_failure(frame->channel, ENOMEM, "request");
			return;
		}
		parts = larger;
		memcpy(parts + parts_length, payload, frame->length);
		parts_length += frame->length;
		if (frame->kind == K_SPAWN) {
			spawn(frame->channel, parts, parts_length);
			parts_length = 0;
		}
	} else if (c && frame->kind == K_STDIN) {
		take_stdin(c, payload, frame->length);
	} else if (c && frame->kind == K_STDIN_END) {
		c->end_pending = 1;
		feed(c);
	} else if (c && frame->kind == K_SIGNAL && frame->length == 1 && c->pid) {
		kill(-c->pid, payload[0]);
	} else if (c && frame->kind == K_GRANT) {
		c->window += number;
	} else if (c && frame->kind == K_FORGET) {
		forget(c);
	}
}

static void take_frames(void)
{
	uint32_t at = 0;
	struct frame frame;

	while (at < in_length) {
		if (!in[at]) {
			at++;
			continue;
		}
		if (in_length - at < sizeof(frame))
			break;
		memcpy(&frame, in + at, sizeof(frame));
		if (frame.length > MAX_PAYLOAD) { /* nonsense: padding will bring us back in step */
			at++;
			continue;
		}
		if (in_length - at < sizeof(frame) + frame.length)
			break;
		obey(&frame, in + at + sizeof(frame));
		at += sizeof(frame) + frame.length;
	}
	in_length -= at;
	memmove(in, in + at, in_length);
}

/* -- the connection --------------------------------------------------------------------------------------------- */

static void receive(void)
{
	ssize_t got = connection < 0 ? 0 : read(connection, in + in_length, sizeof(in) - in_length);

	if (got > 0) {
		in_length += got;
		take_frames();
	} else if (listener >= 0 && (got == 0 || (errno != EAGAIN && errno != EINTR))) {
		shut(&connection);
		in_length = 0;
	}
	/* A port that nobody holds on the other side reads as at its end; somebody will hold it again. */
	hung_up = got == 0 || connection < 0;
	if (hung_up)
		out_start = out_end = 0;
}

static void accept_next(void)
{
	int next = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (next >= 0) {
		shut(&connection);
		connection = next;
		hung_up = in_length = out_start = out_end = 0;
	}
}

static void open_port(void)
{
	char path[300], name[64] = "", device[300];

	for (int turn = 0; connection < 0; turn++) {
		DIR *ports = opendir("/sys/class/virtio-ports");
		for (struct dirent *entry; ports && connection < 0 && (entry = readdir(ports));) {
			snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", entry->d_name);
			int fd = entry->d_name[0] == '.' ? -1 : open(path, O_RDONLY | O_CLOEXEC);
			ssize_t got = fd < 0 ? 0 : read(fd, name, sizeof(name) - 1);
			close(fd);
			if (got < 15 || strncmp(name, "statefork.agent", 15))
				continue;
			snprintf(device, sizeof(device), "/dev/%s", entry->d_name);
			connection = open(device, O_RDWR | O_NONBLOCK | O_CLOEXEC);
		}
		if (ports)
			closedir(ports);
		if (turn == 1000)
			give_up("no virtio port is called statefork.agent");
		if (connection < 0)
			poll(NULL, 0, 10);
	}
}

static void open_listener(void)
{
	struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = PORT};

	listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 4))
		give_up("vsock");
}

static void serve(int signals)
{
	static struct pollfd polled[3 * MAX_CHANNELS + 3];
	static struct { struct channel *channel; int which; } meaning[3 * MAX_CHANNELS + 3];

	for (;;) {
		int n = 3, timeout = hung_up ? 100 : -1, room = out_room() >= OUT_SPARE;
		polled[0] = (struct pollfd){signals, POLLIN, 0};
		polled[1] = (struct pollfd){hung_up ? -1 : connection, POLLIN | (out_end ? POLLOUT : 0), 0};
		polled[2] = (struct pollfd){listener, POLLIN, 0};
		for (int i = 0; i < MAX_CHANNELS; i++) {
			struct channel *c = &channels[i];
			if (!c->used)
				continue;
			if (c->in >= 0 && c->pending_length) {
				meaning[n].channel = c, meaning[n].which = 2;
				polled[n++] = (struct pollfd){c->in, POLLOUT, 0};
			}
			for (int which = 0; which < 2; which++)
				if (c->out[which] >= 0 && (!c->id || hung_up || (c->window && room))) {
					meaning[n].channel = c, meaning[n].which = which;
					polled[n++] = (struct pollfd){c->out[which], POLLIN, 0};
				}
		}
		poll(polled, n, timeout);
		for (int i = 3; i < n; i++) {
			struct channel *c = meaning[i].channel;
			if (polled[i].revents && meaning[i].which == 2)
				feed(c);
			else if (polled[i].revents && out_room() >= OUT_SPARE)
				carry(c, meaning[i].which);
		}
		if (polled[0].revents) {
			struct signalfd_siginfo ignored;
			while (read(signals, &ignored, sizeof(ignored)) > 0)
				;
			reap();
		}
		for (int i = 0; i < MAX_CHANNELS; i++)
			if (channels[i].used && !channels[i].pid)
				finish(&channels[i]);
		if (polled[2].revents)
			accept_next();
		else if (hung_up || polled[1].revents & (POLLIN | POLLHUP | POLLERR))
			receive();
		flush_out();
	}
}

#if defined(__x86_64__)
/* An emulated machine cannot find out how fast the host's counter runs, so it is told. */
static int measure_counter(void)
{
	struct timespec a, b;
	uint64_t first, last, ns;

	clock_gettime(CLOCK_MONOTONIC, &a);
	first = __builtin_ia32_rdtsc();
	do {
		clock_gettime(CLOCK_MONOTONIC, &b);
		last = __builtin_ia32_rdtsc();
		ns = (b.tv_sec - a.tv_sec) * 1000000000ull + b.tv_nsec - a.tv_nsec;
	} while (ns < 50000000);
	printf("%llu\n", (unsigned long long)((last - first) * 1000000ull / ns));
	return 0;
}
#else
static int measure_counter(void) { return 1; }
#endif

int main(int argc, char **argv)
{
	struct sched_param priority = {0};
	char transport[16];
	sigset_t mask;

	if (argc == 2 && !strcmp(argv[1], "measure-counter"))
		return measure_counter();
	if (argc == 2 && !strcmp(argv[1], "answer")) /* for the probe, which has no other program at hand */
		return puts("here") < 0;
	if (getpid() != 1) {
		say("%s: runs as PID 1 of a StateFork microVM, and nowhere else", argv[0]);
		return 2;
	}
	umask(0);
	sigfillset(&mask);
	sigprocmask(SIG_BLOCK, &mask, NULL);
	boot();
	umask(022);
	/* Woken by a program that prints, a batch process lets it go on until the pipe is full: fewer and larger frames. */
	sched_setscheduler(0, SCHED_BATCH | SCHED_RESET_ON_FORK, &priority);
	if (parameter("statefork.agent", transport, sizeof(transport)) && !strcmp(transport, "vsock"))
		open_listener();
	else
		open_port();
	serve(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
}
