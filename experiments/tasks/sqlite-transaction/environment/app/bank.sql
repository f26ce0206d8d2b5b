PRAGMA journal_mode=wal;
CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER NOT NULL);
CREATE TABLE audit (what TEXT, total INTEGER);
INSERT INTO accounts VALUES ('ann', 500), ('bob', 300), ('eve', 200);
