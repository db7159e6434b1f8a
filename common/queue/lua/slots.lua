-- Take, renew or give up a process's slots of one server. Works when Redis is full.
--
-- ARGV: server, epoch, slots wanted, bound, TTL (ms), group, rid prefix, about (JSON that begins with
--   `{"holds":N` where the process held N slots before), settled epoch or '' (an expired holder whose
--   requests the caller has aborted; with 0 wanted, one that is known to be dead), quiet ('1' when
--   the server itself says that nothing is open there).
-- Returns {'granted', n} | {'refused', group} (another worker group drives this server) |
--   {'settle', epoch, rid prefix} (abort these requests, then call again with `settled`) |
--   {'wait', ms} (Redis is new, was emptied or taken back; whoever holds slots has not said so yet).

begin_even_when_full()
local server, epoch, wanted, bound = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl_ms, group, rid_prefix, about = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local settled, quiet = ARGV[9], ARGV[10] == '1'
local key, now = slots_key(server), now_ms()

-- Who holds slots; the hash's other fields hold no JSON object.
local function holder_of(name)
  local value = redis.call('HGET', key, name)
  return value and string.sub(value, 1, 1) == '{' and cjson.decode(value) or nil
end

-- How long what Redis holds may still be of the past: holders that it has forgotten declare what they
-- have within one TTL. A quiet server says enough only of a Redis that never knew it: after a rewind a
-- forgotten holder may be about to open what it has prefetched.
local function unsure_ms()
  local run_id = server_run_id()
  local known = redis.call('HGET', key, 'run_id')
  if known ~= run_id then
    redis.call('HSET', key, 'run_id', run_id, 'since', string.format('%.0f', now), 'unsure',
      known and 'restarted' or 'new')
  end
  local unsure = redis.call('HGET', key, 'unsure')
  if not unsure then return 0 end
  local left = tonumber(redis.call('HGET', key, 'since')) + ttl_ms - now
  if left > 0 and not (quiet and unsure == 'new') then return left end
  redis.call('HDEL', key, 'unsure')
  return 0
end

local wait_ms = unsure_ms()

if settled ~= '' then
  local dead = holder_of(settled)
  -- One that has renewed meanwhile lives, and keeps what it has.
  if dead and (wanted == 0 or dead.deadline_ms < now) then redis.call('HDEL', key, settled) end
end
if wanted == 0 then
  redis.call('HDEL', key, epoch)
  return {'granted', 0}
end

local most = wanted
if wait_ms > 0 then
  -- What Redis remembers of this process may be of the past too: only its own word counts, and it
  -- keeps what it has and gets no more.
  most = math.min(wanted, tonumber(string.match(about, '^{"holds":(%d+)') or 0))
  if most == 0 then return {'wait', math.ceil(wait_ms)} end
end

local taken = 0
for _, other in ipairs(redis.call('HKEYS', key)) do
  local slot = other ~= epoch and holder_of(other)
  if slot and slot.deadline_ms >= now then
    if slot.group ~= group then return {'refused', slot.group} end
    taken = taken + slot.slots
  elseif slot and wait_ms == 0 then
    return {'settle', other, slot.rid_prefix}
  end
end

local granted = math.max(0, math.min(most, bound - taken))
redis.call('HSET', key, epoch, cjson.encode({slots = granted, deadline_ms = now + ttl_ms,
  rid_prefix = rid_prefix, group = group, about = about}))
return {'granted', granted}
