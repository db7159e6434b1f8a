-- Keep the finished turns of prompts that are not finished, each in one step. Touches no lease.
--
-- ARGV: epoch, then sixes: run, uid, key, fingerprint, try, turns (all of the try so far, as one text).
-- Turns are kept only where they continue what is kept already: two processes that both served the
-- prompt for a while must not leave a turn of the one behind a turn of the other.
-- Returns one word an item: ok | repeated (kept already) | other (others are kept) | stolen (another
--   process leases it) | changed (another fingerprint) | gone (it has ended, or is in another try) |
--   forgotten; and these, after which the caller asks again: removed (its job has no body now: the
--   audit restores it) | unknown (no such run) | untaught (a rebuild has not yet taught this key).

local epoch = ARGV[1]
local reply = {}

local function keep(run, uid, raw, fingerprint, try, turns)
  local known = redis.call('HMGET', run_key(run), 'uid', 'bits')
  if not known[1] then
    return redis.call('EXISTS', tombstone_key(run)) == 1 and 'forgotten' or 'unknown'
  end
  if known[1] ~= uid then return 'forgotten' end
  local hex = to_hex(raw)
  local entry = ledger_get(run, raw, hex, tonumber(known[2]))
  if not entry then return 'untaught' end
  if entry.fingerprint ~= fingerprint then return 'changed' end
  if not is_queued(entry.state) or entry.try ~= tonumber(try) then return 'gone' end
  -- A job that was given back or reaped and that nobody has claimed since takes them too.
  if redis.call('ZSCORE', leases_key(run), hex) and not holds(run, hex, epoch) then
    return 'stolen'
  end
  local job = redis.call('HMGET', rq_job(hex), 'request', 'turns')
  -- Removed, or not fed yet as far as a rewound Redis knows.
  if not job[1] then return 'removed' end
  local kept = job[2] or ''
  if #turns <= #kept then
    return string.sub(kept, 1, #turns) == turns and 'repeated' or 'other'
  end
  if string.sub(turns, 1, #kept) ~= kept then return 'other' end
  redis.call('HSET', rq_job(hex), 'turns', turns)
  -- The limit of attempts holds for each turn; and a turn is a success.
  redis.call('HDEL', rq_job(hex), 'attempts')
  redis.call('HDEL', run_key(run), 'faults')
  return 'ok'
end

for i = 2, #ARGV, 6 do
  reply[#reply + 1] = keep(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5])
end
return reply
