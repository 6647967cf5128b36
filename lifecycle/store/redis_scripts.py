"""What runs inside Redis: it looks at everything before it writes anything.

Numbers travel as text, for Lua would round what a stream counts beyond 2^53; `plus` is exact below that.
"""

OPEN = """
local found = redis.call('HMGET', KEYS[1], 'format', 'epoch')
if found[1] and found[2] then return found end
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return {} end
redis.call('HSET', KEYS[1], 'format', ARGV[1], 'epoch', ARGV[2], 'head', '0')
return {ARGV[1], ARGV[2]}
"""
"""KEYS: meta, feed. ARGV: format, epoch of a new log. Answers format and epoch, nothing for half a log."""

APPEND = """
local function plus(number, n) return string.format('%.0f', number + n) end
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'head', 'trimmed', 'term')
local seen = redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2])
local known = seen[1] and seen[1][2][2] == ARGV[3]
  or not seen[1] and tonumber(ARGV[2]) <= tonumber(meta[3] or '0')
if meta[1] ~= ARGV[1] or not known then
  return {'other', meta[1] or '', meta[2] or ''}
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
local version = last[1] and string.match(last[1][1], '^%d+')
  or redis.call('HGET', KEYS[4], ARGV[6]) or '0'
if version ~= ARGV[4] then
  local expected = tonumber(ARGV[4])
  if expected >= 0 and expected < tonumber(version) then
    local first = redis.call('XRANGE', KEYS[3], plus(expected, 1), plus(expected, 1))
    local batch = first[1] and redis.call('XRANGE', KEYS[2], first[1][2][2], '+', 'COUNT', 1)
    if batch and batch[1] and batch[1][2][2] == ARGV[5] then return {'ok', plus(first[1][2][2], -1)} end
  end
  return {'conflict', version}
end
if ARGV[7] ~= '' and ARGV[7] ~= (meta[4] or '0') then return {'deposed', meta[4] or '0'} end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local head = newest[1] and string.match(newest[1][1], '^%d+') or '0'
if head ~= meta[2] then return {'torn', head, meta[2] or ''} end
local count = (#ARGV - 7) / 2
for i = 1, count do
  local payload, crc = ARGV[6 + 2 * i], ARGV[7 + 2 * i]
  redis.call('XADD', KEYS[3], plus(version, i), 'p', plus(head, i), 'e', payload, 'c', crc)
end
local position = plus(head, count)
redis.call('XADD', KEYS[2], position, 'm', ARGV[5], 's', ARGV[6], 'v', plus(version, 1), 'n', count)
redis.call('HSET', KEYS[1], 'head', position)
return {'ok', head}
"""
"""KEYS: meta, feed, stream, trimmed. ARGV: epoch, seen position and its mark, expected version, mark,
stream's name, the term of the owner who alone may say this (empty: everybody may), then payload and checksum
of each event.

Answers `ok` and the position before the batch, `conflict` and the stream's version, `deposed` and the term
that runs now, `torn` with the feed's end and the head that was counted, or `other` with the epoch and the
head that are there. The same batch sent again (after an answer was lost) is known by its mark, and gets its
first answer again.
"""

TRIM = """
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'trimmed', 'term')
if meta[1] ~= ARGV[1] then return {'other', meta[1] or ''} end
if ARGV[6] ~= (meta[3] or '0') then return {'deposed', meta[3] or '0'} end
if (meta[2] or '0') ~= ARGV[3] then return {'ok', meta[2] or '0'} end
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[5])
redis.call('HSET', KEYS[1], 'trimmed', ARGV[4], 'format', ARGV[2])
for i = 4, #KEYS do
  local stream, version, after = ARGV[3 * i - 5], ARGV[3 * i - 4], ARGV[3 * i - 3]
  redis.call('XTRIM', KEYS[i], 'MINID', after)
  if redis.call('XLEN', KEYS[i]) == 0 then redis.call('DEL', KEYS[i]) end
  redis.call('HSET', KEYS[3], stream, version)
end
return {'ok', ARGV[4]}
"""
"""KEYS: meta, feed, trimmed, then streams. ARGV: epoch, format of a trimmed log, position trimmed through
so far, position to trim through and the one after it, the owner's term, then for each stream its name, the
last version to trim and the one after it.

Answers `ok` and the position that is trimmed through, `deposed` and the term that runs now, or `other` and
the epoch that is there. Removing comes first: a server whose memory is full refuses a script at a first write
that adds, and no later one.
"""

FORGET = """
local forgotten = 0
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    forgotten = forgotten + redis.call('HDEL', KEYS[1], ARGV[i - 1])
  end
end
return forgotten
"""
"""KEYS: trimmed, then streams. ARGV: the streams' names. Forgets the versions of those without events."""

BEAT = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return {'other', ''} end
redis.call('SET', KEYS[3], '1', 'PX', ARGV[3])
local holder = redis.call('GET', KEYS[2])
if not holder and ARGV[4] == '1' then
  holder = ARGV[2]
  redis.call('HINCRBY', KEYS[1], 'term', 1)
  redis.call('SET', KEYS[2], holder, 'PX', ARGV[3])
elseif holder == ARGV[2] and ARGV[4] == '1' then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
elseif holder == ARGV[2] then
  redis.call('DEL', KEYS[2])
  holder = false
end
return {holder or '', redis.call('HGET', KEYS[1], 'term') or '0'}
"""
"""KEYS: meta, owner's lease, this process's presence. ARGV: epoch, name, milliseconds of both, 1 if it would
own the log.

Answers the owner's name and the term that runs; a term begins when the lease is taken. Who would not own the
log lets go of a lease that is still his: that he resigned may not have been heard, or overtaken by a beat.
`other` for another log."""

RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""KEYS: a lease. ARGV: the name of who lets go of it, if it is his."""

SNAPSHOT = """
local term = redis.call('HGET', KEYS[1], 'term') or '0'
if ARGV[1] ~= term then return {'deposed', term} end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
for i = 5, 4 + ARGV[4] do redis.call('HDEL', KEYS[2], ARGV[i]) end
for i = 5 + ARGV[4], #ARGV do redis.call('HDEL', KEYS[3], ARGV[i]) end
return {'ok', term}
"""
"""KEYS: meta, snapshots, parts. ARGV: the owner's term, position, manifest, number of positions to forget,
those positions, then names of parts to forget. Answers `ok` or `deposed`, and the term that runs."""
