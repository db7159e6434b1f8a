-- Renew a process's leases. Works when Redis is full.
--
-- ARGV: epoch, lease (ms), then pairs: run, key (16 bytes).
-- Returns one word a pair: ok | retaken (it had been reaped, nobody else leases it) |
--   stolen (another process leases it) | gone (it has ended, or its run has been cancelled) |
--   unknown (no such run here, or not yet taught).

begin_even_when_full()
local epoch, lease_ms = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local reply = {}

local function renew(run, raw)
  local known = redis.call('HMGET', run_key(run), 'bits', 'cancelled')
  if not known[1] then return 'unknown' end
  if known[2] then return 'gone' end
  local hex = to_hex(raw)
  local entry = ledger_get(run, raw, hex, tonumber(known[1]))
  if not entry then return 'unknown' end
  if entry.state ~= 'q' then return 'gone' end
  local holder = redis.call('HGET', rq_job(hex), 'holder')
  local leased = redis.call('ZSCORE', leases_key(run), hex)
  if leased and holder ~= epoch then return 'stolen' end
  lease(run, hex, epoch, now + lease_ms)
  if leased then return 'ok' end
  redis.call('HSET', rq_job(hex), 'holder', epoch, 'status', 'started')
  redis.call('ZREM', parked_key(run), hex)
  return 'retaken'
end

for i = 3, #ARGV, 2 do reply[#reply + 1] = renew(ARGV[i], ARGV[i + 1]) end
return reply
