-- End prompts: entry, ledger, counters, job and lease in one step. The first finisher of a
-- (key, try) wins, whoever holds the lease.
--
-- ARGV: epoch, then twelves: run, uid, key, fingerprint, try, outcome (c f x), row, prompt tokens,
--   completion tokens, flags (a letter each, below), repeat ('1' or ''), reason (one word).
-- Returns one word an item: ok | duplicate | repeated | changed (another fingerprint) |
--   unknown (no such run) | untaught (a rebuild has not yet taught this key) | forgotten.

local epoch = ARGV[1]
local now = now_ms()
local STATE = {c = 'd', f = 'f', x = 'c'}
local COUNTER = {c = 'completed', f = 'failed', x = 'cancelled'}
-- What a completion may be flagged with, and is counted as: `common.quality.FLAGS`.
local FLAG = {t = 'truncated', e = 'empty', r = 'repeating', s = 'same_answer',
  u = 'unparsed_reasoning', c = 'reasoning_cut', p = 'prompt_cut', l = 'clamped'}
local reply, runs, active = {}, {}, {}

local function load(run)
  if not runs[run] then
    local v = redis.call('HMGET', run_key(run), 'uid', 'bits', 'partitions', 'rest')
    runs[run] = {uid = v[1], bits = tonumber(v[2]), partitions = tonumber(v[3]), rest = v[4]}
  end
  return runs[run]
end

-- A batch's counters are added up here and written once: a call for each would be a third of the
-- script's time.
local function tally(run, counter, by)
  local sums = active[run]
  if not sums then
    sums = {}
    active[run] = sums
  end
  sums[counter] = (sums[counter] or 0) + by
end

-- Registries that are empty need not be asked for each of a thousand keys.
local function forget_in(state, name, key, hex)
  if state[name] == nil then state[name] = redis.call('EXISTS', key) == 1 end
  if state[name] then redis.call('ZREM', key, hex) end
end

local function end_job(run, state, hex, outcome)
  release(run, hex, outcome ~= 'f')
  forget_in(state, 'parked', parked_key(run), hex)
  forget_in(state, 'canceled', rq_canceled(run), hex)
  if outcome ~= 'f' then
    redis.call('UNLINK', rq_job(hex))
    forget_in(state, 'failed', rq_failed(run), hex)
    return
  end
  -- A failed job stays for `rq requeue`, with its request and without expiry. What RQ reads of it is
  -- written anew: somebody may have deleted the job while it was in flight.
  redis.call('HSET', rq_job(hex), 'status', 'failed', 'data', job_data(hex),
    'origin', run)
  redis.call('PERSIST', rq_job(hex))
  -- A new try begins with the first turn.
  redis.call('HDEL', rq_job(hex), 'turns')
  redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
  state.failed = true
end

local function accept(run, state, raw, hex, item)
  redis.call('XADD', results_key(run, partition_of(raw, state.partitions)), '*', 'k', raw,
    'f', item.fingerprint, 't', item.try, 'o', item.outcome, 'r', item.row, 'i', item.input,
    'n', item.output)
  ledger_set(run, raw, hex, state.bits, item.fingerprint, STATE[item.outcome], item.try)
  end_job(run, state, hex, item.outcome)
  tally(run, COUNTER[item.outcome], 1)
  tally(run, 'stream_bytes', #item.row + 100)
  tally(run, 'stream_entries', 1)
  if item.outcome == 'f' then
    -- Reasons are a fixed few words of ours, so these members stay few.
    tally(run, 'reason:' .. item.reason, 1) -- common.names.REASON
    note_fault(run, item.reason)
  end
  if item.outcome == 'c' then
    redis.call('HDEL', run_key(run), 'faults')
    tally(run, 'input_tokens', tonumber(item.input))
    tally(run, 'output_tokens', tonumber(item.output))
    for letter in string.gmatch(item.flags, '.') do
      if FLAG[letter] then tally(run, FLAG[letter], 1) end
    end
  end
end

local function finish(run, uid, raw, item)
  local state = load(run)
  if not state.uid then
    return redis.call('EXISTS', tombstone_key(run)) == 1 and 'forgotten' or 'unknown'
  end
  if state.uid ~= uid then return 'forgotten' end
  local hex = to_hex(raw)
  local entry = ledger_get(run, raw, hex, state.bits)
  if not entry then
    -- A rebuild that had no room for all prompts has taught all the same what had ended.
    if not state.rest or redis.call('HGET', run_key(run), 'reconciled') ~= server_run_id() then
      return 'untaught'
    end
    entry = {fingerprint = item.fingerprint, state = 'q', try = tonumber(item.try)}
    count(run, 'total', 1)
  end
  if entry.fingerprint ~= item.fingerprint then
    count(run, 'changed_dropped', 1)
    if entry.state == 'q' and holds(run, hex, epoch) and release_unended(run, hex) then
      redis.call('LPUSH', rq_queue(run), hex)
    end
    return 'changed'
  end
  if not is_queued(entry.state) or entry.try ~= tonumber(item.try) then
    if item.again == '1' then return 'repeated' end
    count(run, 'duplicates_dropped', 1)
    return 'duplicate'
  end
  -- A rewound Redis may not know any more that it was fed; and a cancelled run ends what waits.
  if entry.state == 'u' then tally(run, 'unfed', -1) end
  accept(run, state, raw, hex, item)
  return 'ok'
end

for i = 2, #ARGV, 12 do
  reply[#reply + 1] = finish(ARGV[i], ARGV[i + 1], ARGV[i + 2], {
    fingerprint = ARGV[i + 3], try = ARGV[i + 4], outcome = ARGV[i + 5], row = ARGV[i + 6],
    input = ARGV[i + 7], output = ARGV[i + 8], flags = ARGV[i + 9], again = ARGV[i + 10],
    reason = ARGV[i + 11]})
end

local bucket = string.format('%.0f', math.floor(now / 5000))
for run, sums in pairs(active) do
  for counter, by in pairs(sums) do count(run, counter, by) end
  if sums.completed then
    redis.call('HINCRBY', rate_key(run), bucket, sums.completed)
    note_history(run, now, sums.completed, sums.output_tokens or 0, 0, 0, 0)
  end
  note_activity(run, now)
end
return reply
