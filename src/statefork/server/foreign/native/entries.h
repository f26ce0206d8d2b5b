/*
 * What lies in a directory, told with all that a client may ask: one frame 'n' for each, of fields with a NUL behind each: kind (f d l
 * o), mode, size, time of change in ns, owner, group, target and kind of target of a link, path.
 */
#ifndef ENTRIES_H
#define ENTRIES_H
#include "frames.h"
#include "who.h"
#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>

#define MOST_ENTRIES 100000
static int told;

static const char *kind_of(mode_t mode) { return S_ISREG(mode) ? "f" : S_ISDIR(mode) ? "d" : S_ISLNK(mode) ? "l" : "o"; }

static void name_of(const char *file, unsigned id, char *into, size_t room)
{
	static struct { const char *file; unsigned id; char name[64]; } known[16];
	static int next;
	char line[2048];
	FILE *f;

	for (int k = 0; k < 16; k++)
		if (known[k].file == file && known[k].id == id) {
			snprintf(into, room, "%s", known[k].name);
			return;
		}
	snprintf(into, room, "%u", id);
	f = fopen(file, "re");
	while (f && fgets(line, sizeof(line), f)) {
		char *rest = line, *name = strsep(&rest, ":"), *number;
		strsep(&rest, ":");
		number = strsep(&rest, ":");
		if (number && (unsigned)atol(number) == id) {
			snprintf(into, room, "%s", name);
			break;
		}
	}
	if (f)
		fclose(f);
	known[next].file = file, known[next].id = id;
	snprintf(known[next].name, sizeof(known[next].name), "%s", into);
	next = (next + 1) % 16;
}

static int tell_entry(struct buffer *out, const char *path, struct stat *st)
{
	char text[3 * PATH_MAX], owner[64], group[64], target[PATH_MAX] = "";
	const char *behind = "";
	struct stat there;
	int n;

	if (lstat(path, st) < 0)
		return -1;
	name_of("/etc/passwd", st->st_uid, owner, sizeof(owner));
	name_of("/etc/group", st->st_gid, group, sizeof(group));
	if (S_ISLNK(st->st_mode)) {
		ssize_t length = readlink(path, target, sizeof(target) - 1);
		target[length > 0 ? length : 0] = 0;
		behind = stat(path, &there) == 0 ? kind_of(there.st_mode) : "";
	}
	n = snprintf(text, sizeof(text), "%s%c%u%c%lld%c%lld%c%s%c%s%c%s%c%s%c%s%c", kind_of(st->st_mode), 0, st->st_mode & 07777, 0,
		     (long long)st->st_size, 0, (long long)st->st_mtim.tv_sec * 1000000000ll + st->st_mtim.tv_nsec, 0, owner, 0,
		     group, 0, target, 0, behind, 0, path, 0);
	say(out, 'n', text, n);
	if (held(out) > FULL)
		flush(out);
	return 0;
}

static void tell_below(struct buffer *out, const char *path, int depth)
{
	struct dirent **names;
	struct stat st;
	char below[PATH_MAX];
	int n = scandir(path, &names, NULL, alphasort);

	for (int k = 0; k < n; k++) {
		const char *name = names[k]->d_name;
		if (strcmp(name, ".") && strcmp(name, "..") && told < MOST_ENTRIES
		    && (size_t)snprintf(below, sizeof(below), "%s/%s", strcmp(path, "/") ? path : "", name) < sizeof(below)
		    && tell_entry(out, below, &st) == 0) {
			told++;
			if (depth > 1 && S_ISDIR(st.st_mode))
				tell_below(out, below, depth - 1);
		}
		free(names[k]);
	}
	if (n >= 0)
		free(names);
}

/* depth 0: the thing itself. */
static int entries(struct buffer *out, const char *path, int depth)
{
	struct stat st;
	char text[256];
	int wrong = depth ? stat(path, &st) < 0 : tell_entry(out, path, &st) < 0;

	if (!wrong && depth && !S_ISDIR(st.st_mode)) {
		errno = ENOTDIR;
		wrong = 1;
	}
	if (wrong) {
		snprintf(text, sizeof(text), "%d %s", errno, strerror(errno));
		say_text(out, 'f', text);
	} else if (depth) {
		tell_below(out, path, depth);
	}
	flush(out);
	return 0;
}
#endif
