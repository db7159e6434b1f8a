-- Take, renew or give up a process's slots of one server. Works when Redis is full.
--
-- ARGV: server, epoch, slots wanted, bound, TTL (ms), group, rid prefix, about (JSON that begins with
--   `{"holds":N` where the process held N slots before), settled epoch or ''
--   (an expired holder whose requests the caller has aborted; with 0 wanted, one that is known to be
--   dead), quiet ('1' when the server itself says that nothing is open there), token of the drain that
--   the process has heard of, or '', requests that it has open.
-- Returns {'granted', n} | {'refused', group} (another worker group drives this server) |
--   {'settle', epoch, rid prefix} (abort these requests, then call again with `settled`) |
--   {'wait', ms} (Redis is new, was emptied or taken back; whoever holds slots has not said so yet) |
--   {'drained', n, token, ms until what is open is aborted, owner, reason} (n are kept for what is
--   open; nothing may be opened).

begin_even_when_full()
local server, epoch, wanted, bound = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl_ms, group, rid_prefix, about = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local settled, quiet, heard, open = ARGV[9], ARGV[10] == '1', ARGV[11], tonumber(ARGV[12])
local key, now = slots_key(server), now_ms()
local wait_ms, drain = unsure_ms(key, now, ttl_ms, quiet), drain_of(server)

if settled ~= '' then
  local dead = holder_of(key, settled)
  -- One that has renewed meanwhile lives, and keeps what it has.
  if dead and (wanted == 0 or dead.deadline_ms < now) then redis.call('HDEL', key, settled) end
end
if wanted == 0 then
  redis.call('HDEL', key, epoch)
  return {'granted', 0}
end

local declared = tonumber(string.match(about, '^{"holds":(%d+)') or 0)
local most = wanted
if wait_ms > 0 then
  -- What Redis remembers of this process may be of the past too: only its own word counts, and it
  -- keeps what it has and gets no more.
  most = math.min(wanted, declared)
  if most == 0 and not drain then return {'wait', math.ceil(wait_ms)} end
end

local taken = 0
for _, other in ipairs(redis.call('HKEYS', key)) do
  local slot = other ~= epoch and holder_of(key, other)
  if slot and slot.deadline_ms >= now then
    if slot.group ~= group then return {'refused', slot.group} end
    taken = taken + slot.slots
  elseif slot and wait_ms == 0 and not drain then
    return {'settle', other, slot.rid_prefix}
  end
end

local granted = math.max(0, math.min(most, bound - taken))
if drain then
  -- What is open keeps its slots, so that nobody gets them when the drain is over before it has ended.
  -- A process that has not heard of the drain may be opening what it holds slots for.
  granted = heard == drain.token and open or math.max(open, declared)
end
redis.call('HSET', key, epoch, cjson.encode({slots = granted, deadline_ms = now + ttl_ms,
  rid_prefix = rid_prefix, group = group, about = about,
  drain = drain and heard == drain.token and heard or nil}))
if not drain then return {'granted', granted} end
return {'drained', granted, drain.token, math.ceil(drain.deadline_ms - now), drain.owner, drain.reason}
