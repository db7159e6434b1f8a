-- Add prompts to the ledger and to RQ's queue, each at most once. Idempotent.
--
-- ARGV: run, uid, job timeout (s), mode, sequence of the object of inputs/ that holds them (0: not
--   known), then triples: key (16 bytes), fingerprint (8), prompt JSON.
--   mode: '' | 'retry' (failed and cancelled get a new try) | 'replace' (queued and failed take the
--   new text) | 'retry,replace' | 'cancelled' (into a run that was cancelled, to end there: they wait,
--   and are listed nowhere)
-- Beyond the run's window, and behind others that wait, a new prompt's request stays in inputs/ and is
--   fed later (feed.lua); it counts as added and queued all the same.
-- Returns {'unknown'} when the run is not there with this uid, {'cancelled'}, {'no_room'} when there are
--   new prompts and too little of Redis' memory is left (nothing was added), else
--   {'ok', added, queued, completed, failed, cancelled, restored, retried, replaced, conflicts...}
--   conflicts: keys whose fingerprint differs; they are not touched.

local run, uid, timeout_s, mode, seq = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local known = redis.call('HMGET', run_key(run), 'uid', 'bits', 'cancelled')
if known[1] ~= uid then return {'unknown'} end
if known[3] and mode ~= 'cancelled' then return {'cancelled'} end
local bits = tonumber(known[2])
local may_retry = string.find(mode, 'retry', 1, true)
local may_replace = string.find(mode, 'replace', 1, true)

local n = {added = 0, q = 0, d = 0, f = 0, c = 0, restored = 0, retried = 0, replaced = 0}
local conflicts, push = {}, {}

local function adds_any()
  for i = 6, #ARGV, 3 do
    if not ledger_get(run, ARGV[i], to_hex(ARGV[i]), bits) then return true end
  end
end

local share = memory_share()
if share > MOST_LEDGER and adds_any() then
  begin_even_when_full()
  -- From here on a key that the ledger lacks may be one that waits in inputs/.
  redis.call('HSET', run_key(run), 'rest', '1')
  return {'no_room'}
end

local function queue(hex, prompt)
  write_job(run, hex, prompt, timeout_s, 'queued')
  push[#push + 1] = hex
end

-- Somebody's tool removed the job (`rq empty`, Job.delete); the ledger still wants it. Where it is held
-- or parked, it stays so.
local function restore(hex, prompt)
  if redis.call('ZSCORE', leases_key(run), hex) then
    write_job(run, hex, prompt, timeout_s, 'started')
  elseif redis.call('ZSCORE', parked_key(run), hex) then
    write_job(run, hex, prompt, timeout_s, 'queued')
  else
    queue(hex, prompt)
  end
end

-- Where the feeder has to look (again): no later than at these prompts.
local function note_unfed()
  local known = tonumber(redis.call('HGET', run_key(run), 'feed_dirty') or seq)
  redis.call('HSET', run_key(run), 'feed_dirty', math.min(known, seq))
end

local function try_again(raw, hex, entry, fingerprint, prompt)
  ledger_set(run, raw, hex, bits, fingerprint, 'q', entry.try + 1)
  count(run, entry.state == 'f' and 'failed' or 'cancelled', -1)
  redis.call('ZREM', rq_failed(run), hex)
  redis.call('ZREM', rq_canceled(run), hex)
  redis.call('DEL', rq_job(hex))
  queue(hex, prompt)
end

-- The ledger's place without the detour over hex digits, and one call for a key that is new: this is
-- the loop that a million prompts go through.
local stem, shift, skip = ledger_stem(run), 2 ^ (32 - bits), math.floor(bits / 8) + 1
local fresh, unfed = ledger_value('', 'q', 1), ledger_value('', 'u', 1)

local room, _, waiting = window_room(run)
-- Whoever waits goes first.
if waiting > 0 or share > MOST_REQUESTS or known[3] then room = 0 end
local left_out = 0

for i = 6, #ARGV, 3 do
  local raw, fingerprint, prompt = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local hex = to_hex(raw)
  local bucket = stem .. string.format('%x', math.floor(struct.unpack('>I4', raw) / shift))
  local field = string.sub(raw, skip)
  local is_new = redis.call('HSETNX', bucket, field, fingerprint .. (room > 0 and fresh or unfed)) == 1
  local entry = not is_new and ledger_entry(redis.call('HGET', bucket, field))
  if is_new then
    if room > 0 then
      queue(hex, prompt)
      room = room - 1
    else
      left_out = left_out + 1
    end
    n.added = n.added + 1
  elseif entry.fingerprint ~= fingerprint then
    if may_replace and entry.state == 'u' then
      ledger_set(run, raw, hex, bits, fingerprint, 'u', entry.try)
      note_unfed()
      n.replaced = n.replaced + 1
    elseif may_replace and entry.state == 'q' then
      -- Whoever holds the old text now will have its result dropped, and the job goes back then.
      ledger_set(run, raw, hex, bits, fingerprint, 'q', entry.try)
      if redis.call('HEXISTS', rq_job(hex), 'request') == 1 then
        redis.call('HSET', rq_job(hex), 'request', prompt)
      else
        restore(hex, prompt)
      end
      -- Finished turns and charges were the old text's.
      redis.call('HDEL', rq_job(hex), 'turns', 'attempts', 'deaths', 'lost', 'alone', 'died_alone')
      n.replaced = n.replaced + 1
    elseif may_replace and entry.state == 'f' then
      try_again(raw, hex, entry, fingerprint, prompt)
      n.replaced = n.replaced + 1
    else
      conflicts[#conflicts + 1] = raw
    end
  elseif may_retry and (entry.state == 'f' or entry.state == 'c') then
    try_again(raw, hex, entry, fingerprint, prompt)
    n.retried = n.retried + 1
  else
    if entry.state == 'q' and redis.call('HEXISTS', rq_job(hex), 'request') == 0 then
      restore(hex, prompt)
      n.restored = n.restored + 1
    end
    local state = is_queued(entry.state) and 'q' or entry.state
    n[state] = n[state] + 1
  end
end

if left_out > 0 then
  note_unfed()
  if waiting == 0 then redis.call('HSET', run_key(run), 'feed_from', seq) end
  count(run, 'unfed', left_out)
end

for first = 1, #push, 1000 do
  redis.call('RPUSH', rq_queue(run), unpack(push, first, math.min(first + 999, #push)))
end
if #push > 0 then redis.call('SADD', RQ_QUEUES, rq_queue(run)) end
count(run, 'total', n.added)

local reply = {'ok', n.added, n.q, n.d, n.f, n.c, n.restored, n.retried, n.replaced}
for _, raw in ipairs(conflicts) do reply[#reply + 1] = raw end
return reply
