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
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'head', 'trimmed')
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
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local head = newest[1] and string.match(newest[1][1], '^%d+') or '0'
if head ~= meta[2] then return {'torn', head, meta[2] or ''} end
local count = (#ARGV - 6) / 2
for i = 1, count do
  local payload, crc = ARGV[5 + 2 * i], ARGV[6 + 2 * i]
  redis.call('XADD', KEYS[3], plus(version, i), 'p', plus(head, i), 'e', payload, 'c', crc)
end
local position = plus(head, count)
redis.call('XADD', KEYS[2], position, 'm', ARGV[5], 's', ARGV[6], 'v', plus(version, 1), 'n', count)
redis.call('HSET', KEYS[1], 'head', position)
return {'ok', head}
"""
"""KEYS: meta, feed, stream, trimmed. ARGV: epoch, seen position and its mark, expected version, mark,
stream's name, then payload and checksum of each event.

Answers `ok` and the position before the batch, `conflict` and the stream's version, `torn` with the feed's
end and the head that was counted, or `other` with the epoch and the head that are there. The same batch sent
again (after an answer was lost) is known by its mark, and gets its first answer again.
"""

TRIM = """
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'trimmed')
if meta[1] ~= ARGV[1] then return {'other', meta[1] or ''} end
if (meta[2] or '0') ~= ARGV[3] then return {'ok', meta[2] or '0'} end
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[5])
redis.call('HSET', KEYS[1], 'trimmed', ARGV[4], 'format', ARGV[2])
for i = 4, #KEYS do
  local stream, version, after = ARGV[3 * i - 6], ARGV[3 * i - 5], ARGV[3 * i - 4]
  redis.call('XTRIM', KEYS[i], 'MINID', after)
  if redis.call('XLEN', KEYS[i]) == 0 then redis.call('DEL', KEYS[i]) end
  redis.call('HSET', KEYS[3], stream, version)
end
return {'ok', ARGV[4]}
"""
"""KEYS: meta, feed, trimmed, then streams. ARGV: epoch, format of a trimmed log, position trimmed through
so far, position to trim through and the one after it, then for each stream its name, the last version to trim
and the one after it.

Answers `ok` and the position that is trimmed through, or `other` and the epoch that is there. Removing comes
first: a server whose memory is full refuses a script at a first write that adds, and no later one.
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
