-- End leases: those that have run out, or all of one process that is known to be dead.
-- Each counts as a lost lease of its job. Works when Redis is full.
--
-- ARGV: dead epoch or '', limit, lost leases after which a job is parked, my epoch, lease (ms).
-- Returns {back, parked, convicted...}: a job that was tried alone and lost again is leased to my
--   epoch and handed over as {run, uid, key, fingerprint, try, attempts, deaths, lost, prompt}, to be
--   ended as poison_worker.

begin_even_when_full()
local dead, limit, most_lost = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local epoch, lease_ms = ARGV[4], tonumber(ARGV[5])
local now = now_ms()
local back, parked, convicted = 0, 0, {}

local function convict(run, raw, hex, entry)
  local uid = redis.call('HGET', run_key(run), 'uid')
  local job = redis.call('HMGET', rq_job(hex), 'request', 'attempts', 'deaths', 'lost')
  if not job[1] then return end
  lease(run, hex, epoch, now + lease_ms)
  redis.call('HSET', rq_job(hex), 'holder', epoch)
  convicted[#convicted + 1] = {run, uid, raw, entry.fingerprint, entry.try,
    tonumber(job[2] or 0), tonumber(job[3] or 0), tonumber(job[4] or 0), job[1], 1}
end

local function reap(run, bits, hex)
  local raw = to_raw(hex)
  local entry = ledger_get(run, raw, hex, bits)
  release(run, hex)
  if not entry or entry.state ~= 'q' then return end
  if redis.call('EXISTS', rq_job(hex)) == 0 then return end
  redis.call('HDEL', rq_job(hex), 'holder')
  redis.call('HSET', rq_job(hex), 'status', 'queued')
  local lost = redis.call('HINCRBY', rq_job(hex), 'lost', 1)
  if lost > most_lost and redis.call('HGET', rq_job(hex), 'alone') then
    convict(run, raw, hex, entry)
  elseif lost >= most_lost then
    redis.call('ZADD', parked_key(run), now, hex)
    parked = parked + 1
  else
    redis.call('LPUSH', rq_queue(run), hex)
    back = back + 1
  end
end

for _, run in ipairs(redis.call('ZRANGE', RUNS, 0, -1)) do
  local bits = tonumber(redis.call('HGET', run_key(run), 'bits') or 0)
  local limits = dead == '' and {'-inf', now} or {'-inf', '+inf'}
  local ids = redis.call('ZRANGEBYSCORE', leases_key(run), limits[1], limits[2], 'LIMIT', 0, limit)
  for _, hex in ipairs(ids) do
    if dead == '' or redis.call('HGET', rq_job(hex), 'holder') == dead then reap(run, bits, hex) end
  end
end
return {back, parked, unpack(convicted)}
