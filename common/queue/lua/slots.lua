-- Take, renew or give up a process's slots of one server. Works when Redis is full.
--
-- ARGV: server, epoch, slots wanted, bound, TTL (ms), group, rid prefix, about (JSON), settled
--   epoch or '' (an expired holder whose requests the caller has aborted), quiet ('1' when the
--   server itself says that nothing is open there).
-- Returns {'granted', n} | {'refused', group} (another worker group drives this server) |
--   {'settle', epoch, rid prefix} (abort these requests, then call again with `settled`) |
--   {'wait', ms} (Redis is new or was emptied; whoever holds slots has not said so yet).

begin_even_when_full()
local server, epoch, wanted, bound = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl_ms, group, rid_prefix, about = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local settled, quiet = ARGV[9], ARGV[10] == '1'
local key, now = slots_key(server), now_ms()

local run_id = server_run_id()
local known = redis.call('HMGET', key, 'run_id', 'since')
local holds = redis.call('HEXISTS', key, epoch) == 1
if known[1] ~= run_id then
  redis.call('HSET', key, 'run_id', run_id, 'since', string.format('%.0f', now))
  known[2] = now
  if known[1] then redis.call('HSET', key, 'unsure', '1') end
  if not known[1] and not quiet then redis.call('HSET', key, 'unsure', '1') end
end

if settled ~= '' then redis.call('HDEL', key, settled) end
if wanted == 0 then
  redis.call('HDEL', key, epoch)
  return {'granted', 0}
end

local taken = 0
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local other = all[i]
  if string.sub(all[i + 1], 1, 1) == '{' and other ~= epoch then
    local slot = cjson.decode(all[i + 1])
    if slot.deadline_ms < now then return {'settle', other, slot.rid_prefix} end
    if slot.group ~= group then return {'refused', slot.group} end
    taken = taken + slot.slots
  end
end

-- A holder that renews or declares anew keeps what it has; only new grants wait.
if redis.call('HEXISTS', key, 'unsure') == 1 then
  local left = tonumber(known[2]) + ttl_ms - now
  if left <= 0 or quiet then
    redis.call('HDEL', key, 'unsure')
  elseif not holds and string.sub(about, 1, 9) ~= '{"holds":' then
    return {'wait', left}
  end
end

local granted = math.max(0, math.min(wanted, bound - taken))
redis.call('HSET', key, epoch, cjson.encode({slots = granted, deadline_ms = now + ttl_ms,
  rid_prefix = rid_prefix, group = group, about = about}))
return {'granted', granted}
