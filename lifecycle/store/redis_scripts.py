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
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'head')
local seen = redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2])
if meta[1] ~= ARGV[1] or (ARGV[2] ~= '0' and not (seen[1] and seen[1][2][2] == ARGV[3])) then
  return {'other', meta[1] or '', meta[2] or ''}
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
local version = last[1] and string.match(last[1][1], '^%d+') or '0'
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
"""KEYS: meta, feed, stream. ARGV: epoch, seen position and its mark, expected version, mark, stream's name,
then payload and checksum of each event.

Answers `ok` and the position before the batch, `conflict` and the stream's version, `torn` with the feed's
end and the head that was counted, or `other` with the epoch and the head that are there. The same batch sent
again (after an answer was lost) is known by its mark, and gets its first answer again.
"""
