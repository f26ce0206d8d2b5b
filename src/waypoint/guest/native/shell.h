/* The persistent shell and its terminal: start, restart, hand it commands, end what runs in it. Included by init.c. */
#ifndef SHELL_H
#define SHELL_H

#define KEY "\033[9;9;9~"	/* bound in bashrc: "take your command now", for when a line editor has the terminal */

static int shell_at_prompt, shell_fresh, shell_quick_deaths;
static pid_t nested_shell;	/* where there is no bash: the one that a terminal has */
static time_t shell_started_at;
static char *keys;
static size_t n_keys;
static void screen_put(const char *bytes, size_t n);
static void terminals_ended(void);
static int terminals(void);
static void read_terminal(void);

static void must(int failed, const char *what)
{
	if (!failed)
		return;
	fprintf(stderr, "init: %s: %s\n", what, strerror(errno));
	_exit(72);
}

static int fifo(const char *path, int flags)
{
	struct stat st;

	/* in a session that has just been restored every change to a file means a copy of it first, a change of nothing, too */
	if ((mkfifo(path, 0600) && errno != EEXIST) || lstat(path, &st))
		return -1;
	if ((st.st_uid != shell_user.uid || st.st_gid != shell_user.gid) && chown(path, shell_user.uid, shell_user.gid))
		return -1;
	return open(path, flags | O_NONBLOCK | O_CLOEXEC);
}

/*
 * Every pipe counts against a limit per user of the host (fs.pipe-user-pages-soft, 1024 of the usual size), and all sessions are one
 * user there. Above it no pipe can be restored to the size that it had. So ours are as small as can be while nothing goes through them.
 */
static void shrink(int fd)
{
	if (fd >= 0)
		fcntl(fd, F_SETPIPE_SZ, 4096);
}

static void open_everything(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = DIR "/sock" };
	char name[64];

	must(mkdir(DIR, 0711) && errno != EEXIST, DIR);
	unlink(DIR "/tty");
	bell = fifo(DIR "/bell", O_RDWR);
	ctl = fifo(DIR "/ctl", O_RDWR);
	must(bell < 0 || ctl < 0, DIR);
	shrink(bell);
	shrink(ctl);
	master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	must(master < 0 || grantpt(master) || unlockpt(master) || ptsname_r(master, name, sizeof(name)), "opening a terminal");
	slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
	must(slave < 0 || fchown(slave, shell_user.uid, 5), name);
	struct winsize size = { .ws_row = 24, .ws_col = 80 };
	ioctl(slave, TIOCSWINSZ, &size);
	unlink(address.sun_path);
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	must(listener < 0 || bind(listener, (void *)&address, sizeof(address)) || chmod(address.sun_path, 0600) ||
	     listen(listener, 128), "listening");
}

static void plain_signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	for (int s = 1; s < 32; s++)
		signal(s, SIG_DFL);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static void user_environment(const struct user *u)
{
	setenv("HOME", u->home, 1);
	setenv("USER", u->name, 1);
	setenv("LOGNAME", u->name, 1);
}

/* Builders leave it to whoever starts an image to make the directory that WORKDIR names. */
static void make_directories(const char *path)
{
	char text[4096];

	if (*path != '/')
		return;
	snprintf(text, sizeof(text), "%s", path);
	for (char *slash = text + 1; (slash = strchr(slash, '/')); slash++) {
		*slash = 0;
		mkdir(text, 0755);
		*slash = '/';
	}
	mkdir(text, 0755);	/* what cannot be made, the shell cannot enter either: it starts at home then */
}

static void start_shell(void)
{
	const char *base = strrchr(shell_path, '/');
	int is_bash = !strcmp(base ? base + 1 : shell_path, "bash");
	pid_t pid = fork();

	shell_waiting = shell_at_prompt = nested_shell = 0;
	shell_missing = pid < 0;	/* the session is at its limit of processes: tried again with every tick */
	if (pid < 0)
		return;
	if (pid) {
		shell_pid = pid;
		shell_started_at = time(NULL);
		shell_starts++;
		return;
	}
	setsid();
	ioctl(slave, TIOCSCTTY, 0);
	dup2(slave, 0);
	dup2(slave, 1);
	dup2(slave, 2);
	plain_signals();
	user_environment(&shell_user);
	setenv("SHELL", shell_path, 1);
	if (become_user(&shell_user))
		_exit(126);
	if ((!*shell_cwd || chdir(shell_cwd)) && (!*shell_dir || chdir(shell_dir)) && chdir(shell_user.home) && chdir("/"))
		_exit(126);
	if (is_bash)
		execl(shell_path, "bash", "--rcfile", "/.waypoint/bashrc", "-i", NULL);
	else
		execl(shell_path, shell_path, "/.waypoint/shrc", NULL);
	fprintf(stderr, "init: %s: %s\r\n", shell_path, strerror(errno));
	_exit(127);
}

static void shell_died(int code)
{
	struct command *c = current ? find_command(current) : NULL;

	shell_fresh = 1;
	shell_quick_deaths = time(NULL) - shell_started_at < 2 ? shell_quick_deaths + 1 : 0;
	read_terminal();
	if (c)
		finish(c, code, 1, shell_cwd);
	else
		terminals_ended();
	current = 0;
	shell_pid = 0;
	if (shell_quick_deaths < 20)
		start_shell();
}

/* The process group that the terminal belongs to just now; the shell's own when no job is in the foreground. */
static pid_t foreground(void)
{
	pid_t group = 0;

	return ioctl(master, TIOCGPGRP, &group) || group <= 0 ? shell_pid : group;
}

static void signal_command(struct command *c, int sig)
{
	if (c->state != RUNNING || c->exited)
		return;
	if (c->kind == RUN) {
		kill(-c->pid, sig);
	} else if (shell_pid > 0) {
		kill(-foreground(), sig);
	}
}

/*
 * A signal that comes just when the shell starts a program is lost: the program is not in the foreground yet, and the shell
 * waits for it with the signal in its pocket; or it is, but has still the shell's handlers, and forgets it when it becomes the program.
 * So the signal is sent once more to a program that is older than the signal and was not there yet.
 */
static struct { uint32_t id; int signal, ticks; long long at; } late;

static long long started_at(pid_t pid)
{
	char path[64], text[1024], *p;
	long long at = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	f = fopen(path, "re");
	if (!f)
		return -1;
	text[fread(text, 1, sizeof(text) - 1, f)] = 0;
	fclose(f);
	p = strrchr(text, ')');
	if (!p || sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lld", &at) != 1)
		return -1;
	return at;
}

/* The shell itself, or a child of it that has not become a program. */
static int is_shell(pid_t pid)
{
	char path[64];
	struct stat one, other;

	if (pid == shell_pid)
		return 1;
	snprintf(path, sizeof(path), "/proc/%d/exe", pid);
	if (stat(path, &one))
		return 0;
	snprintf(path, sizeof(path), "/proc/%d/exe", shell_pid);
	return !stat(path, &other) && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

static void caller_signals(struct command *c, int sig)
{
	struct timespec now;

	if (c->kind == EXEC && c->state == RUNNING && !c->exited && is_shell(foreground())) {
		clock_gettime(CLOCK_BOOTTIME, &now);
		late.id = c->id;
		late.signal = sig;
		late.ticks = 3;
		late.at = (now.tv_sec * 1000LL + now.tv_nsec / 1000000) * sysconf(_SC_CLK_TCK) / 1000;
	}
	signal_command(c, sig);
}

static void signal_late(void)
{
	struct command *c = late.ticks ? find_command(late.id) : NULL;
	pid_t group = foreground();

	if (late.ticks)
		late.ticks--;
	if (!c || c->exited || current != c->id) {
		late.ticks = 0;
	} else if (!is_shell(group)) {
		long long at = started_at(group);
		if (at >= 0 && at <= late.at)
			signal_command(c, late.signal);
		late.ticks = 0;
	}
}

static void end_command(struct command *c)
{
	int t = c->ending++;

	if (c->exited)
		return;
	if (t == 1 || t == 2)
		signal_command(c, SIGINT);
	else if (t < 6)
		signal_command(c, SIGTERM);
	else if (c->kind == RUN || (shell_pid > 0 && foreground() != shell_pid))
		signal_command(c, SIGKILL);
	if (t >= 6 && c->kind == EXEC && shell_pid > 0)
		kill(shell_pid, SIGINT);	/* so that a loop around the command ends too */
	if (t >= 20 && c->kind == EXEC && shell_pid > 0)
		kill(shell_pid, SIGKILL);
	signal_command(c, SIGCONT);
}

static void read_terminal(void)
{
	ssize_t n;

	for (int i = 0; i < n_clients; i++)
		if (clients[i].fd >= 0 && clients[i].terminal && clients[i].n_out > (256 << 10))
			return;		/* a slow terminal holds its programs back, as any terminal does */
	while ((n = read(master, scratch, sizeof(scratch))) > 0) {
		screen_put(scratch, n);
		if (n < (ssize_t)sizeof(scratch))
			break;
	}
	if (n_keys) {
		n = write(master, keys, n_keys);
		if (n > 0) {
			memmove(keys, keys + n, n_keys - n);
			n_keys -= n;
		}
	}
	if (!n_keys) {
		free(keys);
		keys = NULL;
	}
}

static void press(const char *bytes, size_t n)
{
	keys = realloc(keys, n_keys + n);
	if (!keys)
		_exit(70);
	memcpy(keys + n_keys, bytes, n);
	n_keys += n;
	read_terminal();
}

static void control_message(char *text)
{
	struct command *c = current ? find_command(current) : NULL;
	int slot, status, used = 0;

	if (!strcmp(text, "L")) {
		/* it looked for a terminal a moment before one was attached: it is told now */
		shell_waiting = !terminals() || write(bell, "P\n", 2) != 2;
		shell_at_prompt = 0;
		shell_quick_deaths = 0;
	} else if (!strcmp(text, "P")) {
		shell_at_prompt = 1;
		shell_waiting = 0;
	} else if (!strcmp(text, "X")) {
		nested_shell = 0;
		terminals_ended();
	} else if (sscanf(text, "N %d", &status) == 1) {
		nested_shell = status;
	} else if (!strcmp(text, "S")) {
		if (c)
			c->started = 1;
	} else if (sscanf(text, "D %d %d %n", &slot, &status, &used) == 2 && used) {
		snprintf(shell_cwd, sizeof(shell_cwd), "%s", text + used);
		if (c && c->fifo == slot)
			finish(c, status & 255, 0, shell_cwd);
	}
}

static void read_control(void)
{
	ssize_t n;
	char *end;

	while ((n = read(ctl, ctl_text + n_ctl, sizeof(ctl_text) - n_ctl)) > 0) {
		n_ctl += n;
		while ((end = memchr(ctl_text, 0, n_ctl))) {
			size_t used = end - ctl_text + 1;
			control_message(ctl_text);
			memmove(ctl_text, ctl_text + used, n_ctl - used);
			n_ctl -= used;
		}
		if (n_ctl == sizeof(ctl_text))
			n_ctl = 0;	/* garbage from inside: drop it */
	}
}

static int slot_free(int slot)
{
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->kind == EXEC && commands[k]->fifo == slot && commands[k]->state != QUEUED &&
		    (commands[k]->out[0].fd >= 0 || commands[k]->out[1].fd >= 0))
			return 0;
	return 1;
}

/* A line editor waits for keys: raw terminal, and the shell itself in the foreground. */
static int editor_idle(void)
{
	struct termios t;

	return shell_at_prompt && !tcgetattr(slave, &t) && !(t.c_lflag & ICANON) && foreground() == shell_pid;
}

/* Written over what was there, not truncated first: on a full disk the block that the file has is the only one to be had. */
static int write_text(const char *text, size_t n)
{
	int fd = open(DIR "/c", O_WRONLY | O_CREAT | O_CLOEXEC, 0600), bad;
	ssize_t done;

	if (fd < 0)
		return -1;
	errno = ENOSPC;		/* which a short write does not set */
	done = write(fd, text, n);
	bad = done != (ssize_t)n || ftruncate(fd, n) || fchown(fd, shell_user.uid, shell_user.gid);
	close(fd);
	return bad ? -1 : 0;
}

/* It never began: its caller is told why, and the shell knows nothing of it. */
static void refuse(struct command *c, const char *what)
{
	complain(c->client, c->id, "cannot %s: %s", what, strerror(errno));
	for (int s = 0; s < 2; s++) {
		if (c->out[s].fd >= 0)
			close(c->out[s].fd);
		c->out[s].fd = -1;
	}
	finish(c, 126, 0, shell_cwd);
	c->left[0] = c->left[1] = 0;
	c->state = DONE;
	c->client = -1;
}

static void start_exec(struct command *c)
{
	char path[2][64], in[64] = "/dev/null", line[256];
	uint8_t fresh = shell_fresh;
	int n;

	for (c->fifo = 1; !slot_free(c->fifo); c->fifo++)
		;
	if (write_text(c->pending, c->n_pending)) {
		refuse(c, "write the command into the session");
		return;
	}
	free(c->pending);
	c->pending = NULL;
	c->n_pending = 0;
	for (int s = 0; s < 2; s++) {
		snprintf(path[s], sizeof(path[s]), DIR "/%c.%d", s ? 'e' : 'o', c->fifo);
		c->out[s].fd = fifo(path[s], O_RDONLY);
	}
	if (c->flags & EXEC_INPUT) {
		snprintf(in, sizeof(in), DIR "/i.%d", c->fifo);
		unlink(in);	/* a leftover reader of an earlier command must not get this one's input */
		c->in = fifo(in, O_RDWR);
	}
	if (c->out[0].fd < 0 || c->out[1].fd < 0 || (c->flags & EXEC_INPUT && c->in < 0)) {
		refuse(c, "make the command's pipes");
		return;
	}
	n = snprintf(line, sizeof(line), "%d %s %s\n", c->fifo, in, path[c->flags & EXEC_MERGE ? 0 : 1]);
	if (write(bell, line, n) != n) {
		refuse(c, "ring the shell");
		return;
	}
	c->state = RUNNING;
	c->patient = c->flags & EXEC_OURS;
	current = c->id;
	if (!(c->flags & EXEC_OURS))
		last = c->id;
	shell_fresh = 0;
	reply(c->client, F_STARTED, c->id, &fresh, 1);
	if (!shell_waiting)
		press(KEY, strlen(KEY));
	shell_waiting = 0;
}

/* Nobody sits at the nested shell's prompt and a command waits: leave that shell as a person would, so that it gives the terminal back. */
static void leave_nested(void)
{
	if (nested_shell <= 0 || current || terminals() || foreground() != nested_shell)
		return;
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->state == QUEUED) {
			press("\003\004", 2);
			return;
		}
}

static void start_next(void)
{
	if (current || shell_pid <= 0)
		return;
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->state == QUEUED) {
			if (commands[k]->client < 0 && !commands[k]->grace) {
				forget(commands[k--]);	/* its caller left before it began */
				continue;
			}
			if (shell_waiting || editor_idle())
				start_exec(commands[k]);
			return;
		}
}
#endif
