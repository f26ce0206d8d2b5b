/* Users by /etc/passwd and /etc/group as they are inside: a static binary cannot ask the libc that is there, if there is one. */
#ifndef WHO_H
#define WHO_H
#define _GNU_SOURCE
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct who {
	char name[128], home[512], shell[256];
	uid_t uid;
	gid_t gid;
};

/* By name, or by uid if name is NULL. */
static int who_is(const char *name, uid_t uid, struct who *w)
{
	char line[2048];
	FILE *f = fopen("/etc/passwd", "re");

	while (f && fgets(line, sizeof(line), f)) {
		char *field[7] = { 0 }, *rest = line;
		int n = 0;
		line[strcspn(line, "\n")] = 0;
		while (n < 7 && (field[n] = strsep(&rest, ":")))
			n++;
		if (n < 6 || (name ? strcmp(name, field[0]) != 0 : (uid_t)atol(field[2]) != uid))
			continue;
		snprintf(w->name, sizeof(w->name), "%s", field[0]);
		snprintf(w->home, sizeof(w->home), "%s", field[5]);
		snprintf(w->shell, sizeof(w->shell), "%s", n > 6 && *field[6] ? field[6] : "/bin/sh");
		w->uid = atol(field[2]);
		w->gid = atol(field[3]);
		fclose(f);
		return 1;
	}
	if (f)
		fclose(f);
	if (name && strcmp(name, "root") != 0)
		return 0;
	snprintf(w->name, sizeof(w->name), "root");	/* images without /etc/passwd have a root, too */
	snprintf(w->home, sizeof(w->home), "/root");
	snprintf(w->shell, sizeof(w->shell), "/bin/sh");
	w->uid = w->gid = 0;
	return 1;
}

static int become(const struct who *w)
{
	gid_t groups[64] = { w->gid };
	int count = 1;
	char line[8192];
	FILE *f = fopen("/etc/group", "re");

	while (f && fgets(line, sizeof(line), f)) {
		char *rest = line, *field[4] = { 0 }, *member;
		line[strcspn(line, "\n")] = 0;
		for (int n = 0; n < 4; n++)
			field[n] = strsep(&rest, ":");
		while (field[3] && (member = strsep(&field[3], ",")))
			if (strcmp(member, w->name) == 0 && count < 64)
				groups[count++] = atol(field[2]);
	}
	if (f)
		fclose(f);
	return setgroups(count, groups) || setgid(w->gid) || setuid(w->uid);
}
#endif
