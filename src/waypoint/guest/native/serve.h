/* The unix socket: accepts callers from outside the session, and turns frames into commands. Included by init.c. */
#ifndef SERVE_H
#define SERVE_H

static int client_may_send(int i)
{
	for (int k = 0; k < n_commands; k++)
		if (commands[k]->client == i && commands[k]->state == RUNNING && commands[k]->n_pending > (1 << 20))
			return 0;
	return 1;
}

static void start_run(struct command *c, const char *text, size_t n)
{
	const char *end = text + n, *user = text, *cwd, *word;
	int in[2] = { -1, -1 }, out[2] = { -1, -1 }, err[2] = { -1, -1 }, argc, k;
	char **argv, **env;
	struct user u;

	if (!n || text[n - 1])
		goto bad;
	cwd = user + strlen(user) + 1;
	word = cwd < end ? cwd + strlen(cwd) + 1 : end;
	if (word >= end || (argc = atoi(word)) < 1 || argc > (1 << 20))
		goto bad;
	argv = calloc(argc + 1, sizeof(*argv));
	env = calloc(n + 1, sizeof(*env));
	if (!argv || !env)
		goto bad;
	word += strlen(word) + 1;
	for (k = 0; k < argc && word < end; k++, word += strlen(word) + 1)
		argv[k] = (char *)word;
	if (k < argc)
		goto bad;
	for (k = 0; word < end; k++, word += strlen(word) + 1)
		env[k] = (char *)word;
	if (find_user(user, &u)) {
		complain(c->client, c->id, "no user %s in the session", user);
		free(argv);
		free(env);
		goto gone;
	}
	if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || (c->pid = fork()) < 0) {
		complain(c->client, c->id, "cannot start a program: %s", strerror(errno));
		for (k = 0; k < 2; k++) {
			close(in[k]);
			close(out[k]);
			close(err[k]);
		}
		free(argv);
		free(env);
		goto gone;
	}
	if (c->pid == 0) {
		setsid();
		dup2(in[0], 0);
		dup2(out[1], 1);
		dup2(c->flags & EXEC_MERGE ? out[1] : err[1], 2);
		plain_signals();
		clearenv();
		for (k = 0; env[k]; k++)
			putenv(env[k]);
		user_environment(&u);
		if (become_user(&u) || (*cwd && chdir(cwd)) || (!*cwd && chdir(u.home) && chdir("/"))) {
			dprintf(2, "cannot enter %s: %s\n", cwd, strerror(errno));
			_exit(126);
		}
		execvp(argv[0], argv);
		dprintf(2, "%s: %s\n", argv[0], strerror(errno));
		_exit(errno == ENOENT ? 127 : 126);
	}
	free(argv);
	free(env);
	close(in[0]);
	close(out[1]);
	close(err[1]);
	fcntl(out[0], F_SETFL, O_NONBLOCK);
	fcntl(err[0], F_SETFL, O_NONBLOCK);
	fcntl(in[1], F_SETFL, O_NONBLOCK);
	c->out[0].fd = out[0];
	c->out[1].fd = err[0];
	c->in = in[1];
	c->in_closing = !(c->flags & EXEC_INPUT);
	c->started = 1;
	c->state = RUNNING;
	set_cwd(c, *cwd ? cwd : u.home);
	uint8_t fresh = 0;
	reply(c->client, F_STARTED, c->id, &fresh, 1);
	return;
bad:
	complain(c->client, c->id, "malformed run request");
gone:
	c->client = -1;
	forget(c);
}

static unsigned requests;	/* frames that may have changed something: equal numbers, and no caller has */

static void state(int i)
{
	int n = snprintf(scratch, sizeof(scratch), "version=%d\nshell_pid=%d\nshell=%s\nuser=%s\nstate=%s\ncurrent=%u\nlast=%u\nnext=%u\nstarts=%d\nrequests=%u\ncwd=%s\n",
			 WIRE_VERSION, shell_pid, shell_path, shell_user.name,
			 current ? "busy" : shell_waiting ? "idle" : shell_at_prompt ? "prompt" : "starting",
			 current, last, next_id, shell_starts, requests, shell_cwd);
	reply(i, F_STATE, 0, scratch, n);
}

static void quiesce(int i)
{
	char text[32];
	for (int k = n_commands - 1; k >= 0; k--) {
		struct command *c = commands[k];
		if (c->client >= 0 && c->state != QUEUED)
			c->grace = GRACE_TICKS;
		else if (c->flags & EXEC_OURS && c->state == DONE && !c->grace && c->out[0].fd < 0 && c->out[1].fd < 0)
			forget(c);	/* every snapshot asks the shell for all its variables: nobody wants the answer twice */
	}
	for (int k = 0; k < n_clients; k++)
		if (k != i)
			client_close(k);
	terminals_left();
	malloc_trim(0);		/* what was once used and is free now has no place in a snapshot */
	madvise(scratch, sizeof(scratch), MADV_DONTNEED);
	reply(i, F_READY, 0, text, snprintf(text, sizeof(text), "requests=%u\n", requests));
	client_close(i);
}

static void input(struct command *c, const char *payload, size_t n)
{
	uint64_t offset, known;

	if (!c || c->in < 0 || c->in_closing || n < sizeof(offset))
		return;
	memcpy(&offset, payload, sizeof(offset));
	payload += sizeof(offset);
	n -= sizeof(offset);
	if (offset > c->received)
		return;		/* a gap: its sender has not heard yet what we have */
	known = c->received - offset;
	if (!n && !known)
		c->in_closing = 1;
	if (n <= known)
		return;
	payload += known;
	n -= known;
	char *grown = realloc(c->pending, c->n_pending + n);
	if (!grown)
		_exit(70);
	c->pending = grown;
	memcpy(c->pending + c->n_pending, payload, n);
	c->n_pending += n;
	c->received += n;
}

static void handle(int i, struct frame *f, const char *payload)
{
	struct command *c = find_command(f->id);
	uint64_t offsets[2];

	requests += f->type != F_HELLO && f->type != F_FOLLOW && f->type != F_QUIESCE && f->type != F_BACKGROUND;
	switch (f->type) {
	case F_HELLO:
		state(i);
		return;
	case F_EXEC:
	case F_RUN:
		if (!f->length)
			return;
		if (f->type == F_EXEC && (payload[0] & EXEC_NO_WAIT) && (current || !(shell_waiting || editor_idle()))) {
			reply(i, F_BUSY, current, NULL, 0);
			return;
		}
		if (f->type == F_EXEC && shell_pid <= 0 && !shell_missing) {
			complain(i, 0, "the shell %s cannot be started in this session", shell_path);
			return;
		}
		c = new_command(f->type == F_EXEC ? EXEC : RUN, payload[0], i);
		if (!c) {
			complain(i, 0, "too many commands at once in this session");
		} else if (f->type == F_RUN) {
			start_run(c, payload + 1, f->length - 1);
		} else {
			c->pending = malloc(f->length);
			if (!c->pending)
				_exit(70);
			memcpy(c->pending, payload + 1, f->length - 1);
			c->n_pending = f->length - 1;
		}
		return;
	case F_INPUT:
		input(c, payload, f->length);
		return;
	case F_SIGNAL:
		if (c && f->length)
			caller_signals(c, payload[0]);
		state(i);
		return;
	case F_END:
		if (c && !c->ending)
			c->ending = 1;
		state(i);
		return;
	case F_FOLLOW:
		if (!c || f->length < sizeof(offsets)) {
			complain(i, f->id, "no command %u in this session", f->id);
			return;
		}
		memcpy(offsets, payload, sizeof(offsets));
		for (int s = 0; s < 2; s++)
			c->sent[s] = offsets[s] < c->out[s].end ? offsets[s] : c->out[s].end;
		c->client = i;
		c->grace = 0;
		if (c->flags & EXEC_INPUT)
			tell_taken(c);
		return;
	case F_TERMINAL:
		attach_terminal(i, payload, f->length);
		return;
	case F_KEYS:
		press(payload, f->length);
		return;
	case F_RESIZE:
		resize(payload, f->length);
		return;
	case F_QUIESCE:
		quiesce(i);
		return;
	case F_BACKGROUND: {
		char *text = malloc(RING);
		if (!text)
			_exit(70);
		reply(i, F_LOG, 0, text, spool_get(&background, background.start, text, RING));
		free(text);
		return;
	}
	default:
		complain(i, f->id, "unknown frame %u", f->type);
	}
}

static void read_client(int i)
{
	struct client *c = &clients[i];
	ssize_t n = recv(c->fd, scratch, sizeof(scratch), MSG_DONTWAIT);
	size_t used = 0;
	int terminal = c->terminal;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		client_close(i);
		if (terminal)
			terminals_left();
		return;
	}
	c->in = realloc(c->in, c->n_in + n);
	if (!c->in)
		_exit(70);
	memcpy(c->in + c->n_in, scratch, n);
	c->n_in += n;
	while (c->fd >= 0 && c->n_in - used >= sizeof(struct frame)) {
		struct frame f;
		memcpy(&f, c->in + used, sizeof(f));
		if (f.length > MAX_FRAME) {
			client_close(i);
			return;
		}
		if (c->n_in - used < sizeof(f) + f.length)
			break;
		handle(i, &f, c->in + used + sizeof(f));
		used += sizeof(f) + f.length;
	}
	if (c->fd >= 0 && used) {
		memmove(c->in, c->in + used, c->n_in - used);
		c->n_in -= used;
	}
}

/* Of those that only keep their connection for later: what such a one has sent nobody has read, so it sends it again. -1: none. */
static int idle_client(void)
{
	static int turn;	/* the one that came last goes last */

	for (int n = 0; n < n_clients; n++) {
		int i = turn++ % n_clients;
		struct client *c = &clients[i];
		int used = c->fd < 0 || c->terminal || c->n_in || c->n_out;

		turn %= n_clients;
		for (int k = 0; k < n_commands && !used; k++)
			used = commands[k]->client == i;
		if (!used)
			return i;
	}
	return -1;
}

static void serve_clients(void)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
		struct ucred peer;
		socklen_t n = sizeof(peer);
		int i = 0;
		while (i < n_clients && clients[i].fd >= 0)
			i++;
		if (i == MAX_CLIENTS && (i = idle_client()) >= 0)
			client_close(i);
		if (i < 0)
			i = MAX_CLIENTS;
		/* a caller from outside has no pid in this namespace; anyone else is a process of the session */
		if (i == MAX_CLIENTS || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) || peer.pid) {
			close(fd);
			continue;
		}
		clients[i].fd = fd;
		n_clients += i == n_clients;
	}
	for (int i = 0; i < n_clients; i++)
		if (clients[i].fd >= 0) {
			client_flush(i);
			if (clients[i].fd >= 0 && client_may_send(i))
				read_client(i);
		}
}
#endif
