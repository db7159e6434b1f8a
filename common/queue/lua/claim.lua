-- Pop jobs over the active runs, by priority then age, and lease them to one process.
--
-- ARGV: n, epoch, server, lease (ms), stream mark (bytes), RQ worker name, 'alone' or '', runs...
--   alone: the process holds nothing, so it may try suspects of server deaths by themselves.
--   runs: serve only these; none means all.
-- Returns {why, job...}; why: 'ok', 'suspended', 'drained' (the server is), 'no_slot', 'full' (streams),
--   'unreconciled', 'paused', 'empty'; a job: {run, uid, key, fingerprint, try, attempts, deaths, lost, prompt, alone,
--   died_alone} and, where turns of it are finished, those (turn.lua).

local want, epoch, server = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local lease_ms, mark_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local worker_name, alone = ARGV[6], ARGV[7] == 'alone'

if redis.call('EXISTS', RQ_SUSPENDED) == 1 then return {'suspended'} end
if drain_of(server) then return {'drained'} end

local now = now_ms()
local slot = redis.call('HGET', slots_key(server), epoch)
if not slot then return {'no_slot'} end
slot = cjson.decode(slot)
if slot.slots < 1 or slot.deadline_ms < now then return {'no_slot'} end

local runs = {}
for i = 8, #ARGV do runs[#runs + 1] = ARGV[i] end
if #runs == 0 then runs = redis.call('ZRANGE', RUNS, 0, -1) end

local waiting_bytes = all_stream_bytes()
local was_full = redis.call('HGET', slots_key(server), 'full') == '1'
local full = waiting_bytes > mark_bytes or (was_full and waiting_bytes > mark_bytes / 2)
if full ~= was_full then redis.call('HSET', slots_key(server), 'full', full and '1' or '0') end
if full then return {'full'} end

local run_id = server_run_id()
local reply, why = {'ok'}, 'empty'

local function read_job(hex)
  return redis.call('HMGET', rq_job(hex), 'request', 'attempts', 'deaths', 'lost', 'status', 'turns',
    'died_alone', 'alone')
end

-- trial: 0, or a suspect: 1 tried alone, 2 tried with a few others.
local function take(run, state, raw, hex, entry, job, trial)
  lease(run, hex, epoch, now + lease_ms)
  redis.call('HSET', rq_job(hex), 'status', 'started', 'holder', epoch, 'worker_name', worker_name)
  redis.call('PERSIST', rq_job(hex))
  if trial > 0 then
    redis.call('HSET', rq_job(hex), 'alone', trial == 1 and '1' or 'few')
  elseif job[8] then
    -- It was tried once, and is among others now.
    redis.call('HDEL', rq_job(hex), 'alone')
  end
  reply[#reply + 1] = {run, state.uid, raw, entry.fingerprint, entry.try, tonumber(job[2] or 0),
    tonumber(job[3] or 0), tonumber(job[4] or 0), job[1], trial, tonumber(job[7] or 0), job[6] or nil}
end

-- A failed prompt that has left RQ's failed registry was requeued by hand: a new try.
local function requeued_by_hand(run, state, raw, hex, entry)
  if redis.call('ZSCORE', rq_failed(run), hex) then return false end
  entry.try, entry.state = entry.try + 1, 'q'
  ledger_set(run, raw, hex, state.bits, entry.fingerprint, 'q', entry.try)
  count(run, 'failed', -1)
  redis.call('HDEL', rq_job(hex), 'attempts', 'deaths', 'lost', 'alone', 'died_alone', 'turns')
  return true
end

local function offer(run, state, hex)
  if not is_job_id(hex) or (not is_ours(hex) and not ledger_get(run, to_raw(hex), hex, state.bits)) then
    -- Not ours: a job that somebody put into this queue. It fails visibly, as RQ's own would.
    if redis.call('EXISTS', rq_job(hex)) == 1 then
      redis.call('HSET', rq_job(hex), 'status', 'failed')
      redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
    end
    return
  end
  local raw = to_raw(hex)
  local entry = ledger_get(run, raw, hex, state.bits)
  if not entry or entry.state == 'd' or entry.state == 'c' then
    redis.call('UNLINK', rq_job(hex))
    return
  end
  if entry.state == 'u' then return end
  if entry.state == 'f' and not requeued_by_hand(run, state, raw, hex, entry) then return end
  if redis.call('ZSCORE', leases_key(run), hex) then return end
  if redis.call('ZSCORE', parked_key(run), hex) then return end
  local job = read_job(hex)
  -- Without a body the audit restores it; a cancelled one becomes a cancellation there.
  if not job[1] or job[5] == 'canceled' then return end
  redis.call('ZREM', rq_failed(run), hex)
  take(run, state, raw, hex, entry, job, 0)
end

-- Whether any of those that were last tried still is.
local function trial_goes_on(run)
  for hex in string.gmatch(redis.call('HGET', run_key(run), 'suspect') or '', '%x+') do
    if redis.call('ZSCORE', leases_key(run), hex) then return true end
  end
  return false
end

-- How many suspects to try next: half of those that the same deaths cast suspicion on, since one of
-- them is the culprit; the last one alone.
local function how_many(run)
  local first = redis.call('ZRANGE', parked_key(run), 0, 0, 'WITHSCORES')
  if #first == 0 then return 0 end
  local weight = math.ceil(-tonumber(first[2]) / SUSPICION_MS)
  local alike = redis.call('ZCOUNT', parked_key(run), '-inf', -(weight - 1) * SUSPICION_MS)
  return math.min(want, math.ceil(alike / 2))
end

local function try_suspects(run, state)
  local most = how_many(run)
  if most < 1 or trial_goes_on(run) then return false end
  local found = {}
  for _, hex in ipairs(redis.call('ZRANGE', parked_key(run), 0, most - 1)) do
    local raw = to_raw(hex)
    local entry = ledger_get(run, raw, hex, state.bits)
    local job = read_job(hex)
    redis.call('ZREM', parked_key(run), hex)
    if entry and entry.state == 'q' and job[1] and job[5] ~= 'canceled' then
      found[#found + 1] = {raw, hex, entry, job}
    end
  end
  local tried = {}
  for _, one in ipairs(found) do
    take(run, state, one[1], one[2], one[3], one[4], #found == 1 and 1 or 2)
    tried[#tried + 1] = one[2]
  end
  if #tried > 0 then redis.call('HSET', run_key(run), 'suspect', table.concat(tried, ' ')) end
  return #tried > 0
end

local function state_of(run)
  local v = redis.call('HMGET', run_key(run), 'uid', 'bits', 'paused', 'cancelled', 'reconciled')
  if not v[1] then return nil end
  if v[4] then return nil end
  if v[3] then why = why == 'empty' and 'paused' or why return nil end
  if v[5] ~= run_id then why = 'unreconciled' return nil end
  return {uid = v[1], bits = tonumber(v[2])}
end

local popped, by_itself = 0, false
for _, run in ipairs(runs) do
  local state = state_of(run)
  if state then
    local before = #reply
    while #reply - 1 < want and popped < 4 * want do
      local most = math.min(want - (#reply - 1), 4 * want - popped)
      local ids = redis.call('LPOP', rq_queue(run), most)
      if not ids then break end
      popped = popped + #ids
      for _, hex in ipairs(ids) do offer(run, state, hex) end
    end
    if #reply == 1 and alone then by_itself = try_suspects(run, state) end
    if #reply > before then note_activity(run, now) end
  end
  if by_itself or #reply - 1 >= want then break end
end

if #reply == 1 then
  -- Everything popped was stale: there may be more behind it.
  reply[1] = popped >= 4 * want and 'ok' or why
end
return reply
