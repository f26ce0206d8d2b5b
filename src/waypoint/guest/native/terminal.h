/*
 * Terminals that people attach: what the screen showed, kept as the bytes that drew it, and the size. Included by init.c.
 * Of what has left the ring only the terminal's modes are remembered (which screen, keypad, mouse, paste), so that a program
 * that has been drawing for hours still finds the terminal that it set up.
 */
#ifndef TERMINAL_H
#define TERMINAL_H

static const int mode_numbers[] = { 1, 5, 6, 7, 12, 25, 47, 66, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004 };
#define N_MODES (sizeof(mode_numbers) / sizeof(*mode_numbers))
static char mode_now[N_MODES], keypad;		/* the final byte of the sequence that set it last, 0 for never */
static char sequence[64];			/* an escape sequence that is not complete yet */
static size_t n_sequence;

static void set_modes(void)
{
	char *p = sequence + 3, final = sequence[n_sequence - 1];

	while (p < sequence + n_sequence - 1) {
		long number = strtol(p, &p, 10);
		for (size_t m = 0; m < N_MODES; m++)
			if (mode_numbers[m] == number)
				mode_now[m] = final;
		if (*p++ != ';')
			return;
	}
}

static void watch_modes(const char *bytes, size_t n)
{
	for (size_t k = 0; k < n; k++) {
		char b = bytes[k];
		if (b == '\033' || n_sequence == sizeof(sequence))
			n_sequence = 0;
		else if (!n_sequence)
			continue;
		sequence[n_sequence++] = b;
		if (n_sequence == 2 && b != '[') {
			if (b == '=' || b == '>')
				keypad = b;
			if (b == 'c') {
				keypad = 0;
				memset(mode_now, 0, sizeof(mode_now));
			}
			n_sequence = 0;
		} else if (n_sequence > 2 && b >= 0x40 && b <= 0x7e) {
			if (sequence[2] == '?' && (b == 'h' || b == 'l'))
				set_modes();
			n_sequence = 0;
		}
	}
}

static void screen_put(const char *bytes, size_t n)
{
	char old[1024];		/* not in scratch: `bytes` are there */
	size_t kept = screen.end - screen.start, leaving = kept + n > RING ? kept + n - RING : 0;

	for (size_t got; leaving && (got = spool_get(&screen, screen.start, old, leaving < sizeof(old) ? leaving : sizeof(old)));) {
		watch_modes(old, got);
		screen.start += got;
		leaving -= got;
	}
	spool_put(&screen, bytes, n);
	for (int i = 0; i < n_clients; i++)
		if (clients[i].fd >= 0 && clients[i].terminal)
			reply(i, F_KEYS, 0, bytes, n);
}

static void resize(const char *payload, size_t n)
{
	uint16_t rows_cols[2];
	struct winsize size = { 0 };

	if (n < sizeof(rows_cols))
		return;
	memcpy(rows_cols, payload, sizeof(rows_cols));
	size.ws_row = rows_cols[0];
	size.ws_col = rows_cols[1];
	ioctl(slave, TIOCSWINSZ, &size);
}

/* What brings an empty terminal to where the ring begins. */
static void send_modes(int i)
{
	char text[32 * N_MODES + sizeof(sequence)];
	size_t n = 0;

	for (size_t m = 0; m < N_MODES; m++)
		if (mode_now[m])
			n += sprintf(text + n, "\033[?%d%c", mode_numbers[m], mode_now[m]);
	if (keypad)
		n += sprintf(text + n, "\033%c", keypad);
	memcpy(text + n, sequence, n_sequence);
	n += n_sequence;
	if (n)
		reply(i, F_KEYS, 0, text, n);
}

static void attach_terminal(int i, const char *payload, size_t n)
{
	uint64_t at = UINT64_MAX;
	struct winsize size;

	if (n >= 4 + sizeof(at))
		memcpy(&at, payload + 4, sizeof(at));
	int whole = at < screen.start || at > screen.end;
	if (whole)
		at = screen.start;
	reply(i, F_SCREEN, 0, &at, sizeof(at));
	if (whole)
		send_modes(i);
	for (size_t got; (got = spool_get(&screen, at, scratch, sizeof(scratch))); at += got)
		reply(i, F_KEYS, 0, scratch, got);
	reply(i, F_SCREEN, 0, &at, sizeof(at));
	if (i < 0 || clients[i].fd < 0)
		return;		/* gone while we sent */
	clients[i].terminal = 1;
	/* a changed size makes full-screen programs draw themselves anew, so change it even to what it was */
	if (!ioctl(slave, TIOCGWINSZ, &size)) {
		size.ws_col++;
		ioctl(slave, TIOCSWINSZ, &size);
	}
	resize(payload, n);
	close(open(DIR "/tty", O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
	if (shell_waiting)
		shell_waiting = write(bell, "P\n", 2) != 2;
}

static int terminals(void)
{
	int n = 0;

	for (int i = 0; i < n_clients; i++)
		n += clients[i].fd >= 0 && clients[i].terminal;
	return n;
}

static void terminals_left(void)
{
	if (!terminals())
		unlink(DIR "/tty");
}

/* The shell that people were in has ended of itself: they leave it, as they would any shell. */
static void terminals_ended(void)
{
	for (int i = 0; i < n_clients; i++)
		if (clients[i].fd >= 0 && clients[i].terminal) {
			clients[i].terminal = 0;
			reply(i, F_ENDED, 0, NULL, 0);
		}
	terminals_left();
}
#endif
