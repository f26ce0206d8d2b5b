/* Users as the session's own /etc/passwd and /etc/group tell them; a static program cannot use NSS. */
#ifndef USERS_H
#define USERS_H
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct user {
	unsigned uid, gid;
	char name[64], home[256];
	gid_t groups[64];
	int n_groups;
};

static char *field(char **line)
{
	char *start = *line, *colon = start ? strchr(start, ':') : NULL;

	if (colon)
		*colon = 0;
	*line = colon ? colon + 1 : NULL;
	return start ? start : (char *)"";
}

static int all_digits(const char *s) { return *s && s[strspn(s, "0123456789")] == 0; }

/* `spec` is NAME or UID, each with an optional :GROUP or :GID. Returns 0, or -1 when nobody is called that. */
static int find_user(const char *spec, struct user *u)
{
	char text[256], line[1024], *group, *rest;
	int found = 0;
	FILE *f;

	memset(u, 0, sizeof(*u));
	snprintf(text, sizeof(text), "%s", *spec ? spec : "0");
	group = strchr(text, ':');
	if (group)
		*group++ = 0;
	snprintf(u->home, sizeof(u->home), "/");
	f = fopen("/etc/passwd", "re");
	while (f && !found && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		rest = line;
		char *name = field(&rest);
		field(&rest);
		unsigned uid = strtoul(field(&rest), NULL, 10), gid = strtoul(field(&rest), NULL, 10);
		field(&rest);
		char *home = field(&rest);
		if (strcmp(name, text) && !(all_digits(text) && strtoul(text, NULL, 10) == uid))
			continue;
		u->uid = uid;
		u->gid = gid;
		snprintf(u->name, sizeof(u->name), "%.63s", name);
		snprintf(u->home, sizeof(u->home), "%.255s", *home ? home : "/");
		found = 1;
	}
	if (f)
		fclose(f);
	if (!found) {
		if (!all_digits(text) && strcmp(text, "root"))
			return -1;
		u->uid = u->gid = strtoul(text, NULL, 10);
		snprintf(u->name, sizeof(u->name), "%.63s", u->uid ? text : "root");
		snprintf(u->home, sizeof(u->home), "%s", u->uid ? "/" : "/root");
	}
	if (group && all_digits(group)) {
		u->gid = strtoul(group, NULL, 10);
		group = NULL;
	}
	f = fopen("/etc/group", "re");
	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		rest = line;
		char *name = field(&rest);
		field(&rest);
		unsigned gid = strtoul(field(&rest), NULL, 10);
		if (group && !strcmp(name, group)) {
			u->gid = gid;
			group = NULL;
		}
		for (char *m = rest ? strtok(rest, ",") : NULL; m; m = strtok(NULL, ","))
			if (!strcmp(m, u->name) && u->n_groups < 63)
				u->groups[u->n_groups++] = gid;
	}
	if (f)
		fclose(f);
	if (group)
		return -1;
	u->groups[u->n_groups++] = u->gid;
	return 0;
}

static int become_user(const struct user *u)
{
	return setgroups(u->n_groups, u->groups) || setresgid(u->gid, u->gid, u->gid) || setresuid(u->uid, u->uid, u->uid);
}
#endif
