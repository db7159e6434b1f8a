-- End leases: those that have run out, or all of one process that is known to be dead.
-- Each counts as a lost lease of its job. Works when Redis is full.
--
-- ARGV: dead epoch or '', limit, lost leases after which a job is parked, my epoch, lease (ms),
--   'steady' or '': only when my own renewals have come without a gap for one whole lease. Judged here
--   and not by the caller, whose call may have waited in a frozen Redis while every lease ran out.
-- Returns {back, parked, convicted...}: a job that was tried alone and lost again is leased to my
--   epoch and handed over as {run, uid, key, fingerprint, try, attempts, deaths, lost, prompt}, to be
--   ended as poison_worker.

begin_even_when_full()
local dead, limit, most_lost = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local epoch, lease_ms = ARGV[4], tonumber(ARGV[5])
local now = now_ms()
local back, parked, convicted = 0, 0, {}

local function steady()
  local since, last = string.match(redis.call('GET', renewed_key(epoch)) or '', '^(%d+) (%d+)$')
  return since and now - tonumber(since) >= lease_ms and now - tonumber(last) <= lease_ms / 2
end

if ARGV[6] == 'steady' and not steady() then return {0, 0} end

local function convict(run, raw, hex, entry)
  local uid = redis.call('HGET', run_key(run), 'uid')
  local job = redis.call('HMGET', rq_job(hex), 'request', 'attempts', 'deaths', 'lost')
  if not job[1] then return end
  lease(run, hex, epoch, now + lease_ms)
  redis.call('HSET', rq_job(hex), 'holder', epoch, 'status', 'started')
  convicted[#convicted + 1] = {run, uid, raw, entry.fingerprint, entry.try,
    tonumber(job[2] or 0), tonumber(job[3] or 0), tonumber(job[4] or 0), job[1], 1}
end

local function reap(run, bits, hex)
  local raw = to_raw(hex)
  local entry = ledger_get(run, raw, hex, bits)
  if not entry or entry.state ~= 'q' then return release(run, hex) end
  if not release_unended(run, hex) then return end
  local lost = redis.call('HINCRBY', rq_job(hex), 'lost', 1)
  note_death(run, now, 'a worker process died')
  local alone = redis.call('HGET', rq_job(hex), 'alone')
  if alone == '1' and lost > most_lost then
    convict(run, raw, hex, entry)
  elseif alone or lost >= most_lost then
    park(run, hex, now)
    parked = parked + 1
  else
    redis.call('LPUSH', rq_queue(run), hex)
    back = back + 1
  end
end

-- What is to be reaped of a run, the last deadline first, so that what is put at the front of the
-- queue stands there in the order of the claims.
local function due(run)
  if dead == '' then
    return redis.call('ZREVRANGEBYSCORE', leases_key(run), now, '-inf', 'LIMIT', 0, limit)
  end
  local found = {}
  for _, hex in ipairs(redis.call('ZREVRANGE', leases_key(run), 0, -1)) do
    if #found < limit and holds(run, hex, dead) then found[#found + 1] = hex end
  end
  return found
end

for _, run in ipairs(redis.call('ZRANGE', RUNS, 0, -1)) do
  local bits = tonumber(redis.call('HGET', run_key(run), 'bits') or 0)
  for _, hex in ipairs(due(run)) do reap(run, bits, hex) end
end
return {back, parked, unpack(convicted)}
