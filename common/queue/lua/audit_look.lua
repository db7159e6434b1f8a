-- See whether anything of a run can be lost, and what somebody cancelled with RQ's tools.
--
-- ARGV: run, uid, least time since the last audit (ms), how many cancelled jobs to look at, and how
--   many of them to pass over (those that an earlier call left).
-- Returns {'unknown'} when the run is not there with this uid, {'recent'} (also of a cancelled run),
--   else {'ok', unfinished keys (but those that wait in inputs/), listed, leased, parked, cancelled jobs
--   looked at, and left as they are (in flight, or without their body), then those that are to end as
--   cancelled: {run, uid, key, fingerprint, try, attempts, deaths, lost, prompt}}.

local run, uid, every_ms, most, skip = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]),
  tonumber(ARGV[5])
local known = redis.call('HMGET', run_key(run), 'uid', 'bits', 'audited_ms', 'cancelled')
if known[1] ~= uid then return {'unknown'} end
-- What is left of a cancelled run is not to be listed again: it ends as cancelled.
if known[4] then return {'recent'} end
local bits = tonumber(known[2])

if every_ms > 0 then
  local now = now_ms()
  if known[3] and tonumber(known[3]) + every_ms > now then return {'recent'} end
  redis.call('HSET', run_key(run), 'audited_ms', string.format('%.0f', now))
end

-- A cancelled job whose prompt has ended: what it ended as stays, and a failure can be requeued.
local function leave_registry(hex, entry)
  redis.call('ZREM', rq_canceled(run), hex)
  if entry and entry.state == 'f' and redis.call('HEXISTS', rq_job(hex), 'data') == 1 then
    redis.call('HSET', rq_job(hex), 'status', 'failed')
    redis.call('PERSIST', rq_job(hex))
    redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
  elseif not entry or entry.state ~= 'f' then
    redis.call('UNLINK', rq_job(hex))
  end
end

local left, to_end = 0, {}
local function look(hex)
  if not is_job_id(hex) then left = left + 1 return end
  local raw = to_raw(hex)
  local entry = ledger_get(run, raw, hex, bits)
  if not entry or not is_queued(entry.state) then return leave_registry(hex, entry) end
  local job = redis.call('HMGET', rq_job(hex), 'request', 'attempts', 'deaths', 'lost')
  if redis.call('ZSCORE', leases_key(run), hex) or not job[1] then
    left = left + 1
  else
    to_end[#to_end + 1] = {run, uid, raw, entry.fingerprint, entry.try, tonumber(job[2] or 0),
      tonumber(job[3] or 0), tonumber(job[4] or 0), job[1]}
  end
end

local members = redis.call('ZRANGE', rq_canceled(run), skip, skip + most - 1)
for _, hex in ipairs(members) do look(hex) end

local unfinished = 0
for i, number in ipairs(redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed',
    'cancelled', 'unfed')) do
  unfinished = unfinished + (i == 1 and 1 or -1) * tonumber(number or 0)
end
return {'ok', unfinished, redis.call('LLEN', rq_queue(run)), redis.call('ZCARD', leases_key(run)),
  redis.call('ZCARD', parked_key(run)), #members, left, unpack(to_end)}
