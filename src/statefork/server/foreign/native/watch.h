/* A directory watched with inotify. Each event is one frame 'v': a letter (c created, w written, d removed, m renamed away,
 * a attributes), and the name relative to the directory. */
#ifndef WATCH_H
#define WATCH_H
#include "frames.h"
#include <dirent.h>
#include <limits.h>
#include <sys/inotify.h>
#include <sys/stat.h>

#define MOST_WATCHES 8192
static char *watched[MOST_WATCHES];	/* by watch descriptor: the directory's name, relative, with a slash at its end */

static void watch_below(struct buffer *out, int fd, const char *root, const char *below, int recursive, int tell)
{
	char path[PATH_MAX], name[PATH_MAX];
	struct dirent *entry;
	DIR *d;
	int wd;

	snprintf(path, sizeof(path), "%s/%s", root, below);
	wd = inotify_add_watch(fd, path, IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_ONLYDIR);
	if (wd < 0 || wd >= MOST_WATCHES)
		return;
	free(watched[wd]);
	watched[wd] = strdup(below);
	if (!recursive || !(d = opendir(path)))
		return;
	while ((entry = readdir(d))) {
		struct stat st;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if ((size_t)snprintf(name, sizeof(name), "c%s%s", below, entry->d_name) >= sizeof(name) - 1)
			continue;
		if (tell)	/* made before its directory was watched */
			say_text(out, 'v', name);
		if (fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode)) {
			strcat(name, "/");
			watch_below(out, fd, root, name + 1, 1, tell);
		}
	}
	closedir(d);
}

static void tell_of(struct buffer *out, int fd, const char *root, const struct inotify_event *e, int recursive)
{
	char name[PATH_MAX + 300];
	const char *base = e->wd >= 0 && e->wd < MOST_WATCHES && watched[e->wd] ? watched[e->wd] : NULL;
	char letter = e->mask & (IN_CREATE | IN_MOVED_TO) ? 'c' : e->mask & IN_MODIFY ? 'w' : e->mask & IN_DELETE ? 'd'
		    : e->mask & IN_MOVED_FROM ? 'm' : e->mask & IN_ATTRIB ? 'a' : 0;

	if (!base || !letter || !e->len)
		return;
	snprintf(name, sizeof(name), "%c%s%s", letter, base, e->name);
	say_text(out, 'v', name);
	if (recursive && letter == 'c' && e->mask & IN_ISDIR) {
		strcat(name, "/");
		watch_below(out, fd, root, name + 1, 1, 1);
	}
}

static int watch(struct buffer *out, const char *root, int recursive, const char *identity)
{
	static char bytes[64 << 10] __attribute__((aligned(8)));
	struct stat st;
	char text[512];
	int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);

	if (stat(root, &st) < 0 || (!S_ISDIR(st.st_mode) && (errno = ENOTDIR)) || fd < 0) {
		snprintf(text, sizeof(text), "%d %s", errno, strerror(errno));
		say_text(out, 'f', text);
		flush(out);
		return 0;
	}
	watch_below(out, fd, root, "", recursive, 0);
	snprintf(text, sizeof(text), "%d %s", getpid(), identity);
	say_text(out, 'b', text);
	for (;;) {
		struct pollfd p[3] = {
			{ .fd = 0, .events = POLLIN },
			{ .fd = held(out) ? 1 : -1, .events = POLLOUT },
			{ .fd = held(out) > FULL ? -1 : fd, .events = POLLIN },
		};
		ssize_t n;
		if (drain(out, 1) < 0)
			return 0;
		p[1].fd = held(out) ? 1 : -1;
		if (poll(p, 3, -1) < 0 && errno != EINTR)
			return 1;
		if (p[0].revents && read(0, bytes, sizeof(bytes)) <= 0)
			return 0;
		if (!p[2].revents || (n = read(fd, bytes, sizeof(bytes))) <= 0)
			continue;
		for (char *at = bytes; at < bytes + n; at += sizeof(struct inotify_event) + ((struct inotify_event *)at)->len)
			tell_of(out, fd, root, (struct inotify_event *)at, recursive);
	}
}
#endif
