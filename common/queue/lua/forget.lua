-- Take one run out of Redis, in steps that may be repeated. No key is searched for: the ledger names
-- the jobs, and the caller every other key. What the steps need stands in a key of its own meanwhile,
-- since the run's hash goes first: from then on nobody claims, adds or finishes anything of it.
--
-- ARGV: operation, run, then the operation's own. Returns the operation's reply.

begin_even_when_full()
local operation, run = ARGV[1], ARGV[2]
local DAY_S = 86400

local function waiting(partitions)
  local entries = 0
  for partition = 0, partitions - 1 do
    entries = entries + redis.call('XLEN', results_key(run, partition))
  end
  return entries
end

-- Returns {what a forget that was begun has left behind (JSON) or '', '1' if the run is there, results
-- that wait for a sink, entries set aside, live leases, then the epochs that hold the first of those}.
local function look()
  local known = redis.call('HMGET', run_key(run), 'record', 'partitions')
  local live = redis.call('ZRANGEBYSCORE', leases_key(run), now_ms(), '+inf', 'LIMIT', 0, 1000)
  local reply = {redis.call('GET', forgetting_key(run)) or '', known[1] and '1' or '',
    known[1] and waiting(tonumber(known[2])) or 0, redis.call('HLEN', set_aside_key(run)),
    redis.call('ZCOUNT', leases_key(run), now_ms(), '+inf')}
  local seen = {}
  for _, hex in ipairs(live) do
    local epoch = redis.call('HGET', rq_job(hex), 'holder') or '?'
    if not seen[epoch] then reply[#reply + 1] = epoch end
    seen[epoch] = true
  end
  return reply
end

-- ARGV: uid, '1' to lose results that are not in the store. Returns {'ok', JSON as `look` gives it},
-- {'unknown'} (no such run with this uid), {'leased'} or {'waiting'}.
local function begin()
  local known = redis.call('HMGET', run_key(run), 'uid', 'bits', 'partitions')
  if not known[1] or known[1] ~= ARGV[3] then return {'unknown'} end
  if redis.call('ZCOUNT', leases_key(run), now_ms(), '+inf') > 0 then return {'leased'} end
  if ARGV[4] ~= '1' and waiting(tonumber(known[3])) > 0 then return {'waiting'} end
  local left = cjson.encode({uid = known[1], bits = tonumber(known[2]), partitions = tonumber(known[3])})
  redis.call('SET', forgetting_key(run), left)
  redis.call('SET', tombstone_key(run), known[1], 'EX', DAY_S)
  redis.call('ZREM', RUNS, run)
  redis.call('UNLINK', run_key(run))
  return {'ok', left}
end

-- ARGV: first bucket, buckets, bits. Returns how many prompts were in them.
local function sweep()
  if redis.call('EXISTS', forgetting_key(run)) == 0 then return 0 end
  local first, bits, swept = tonumber(ARGV[3]), tonumber(ARGV[5]), 0
  for bucket = first, math.min(first + tonumber(ARGV[4]), 2 ^ bits) - 1 do
    local name = ledger_stem(run) .. string.format('%x', bucket)
    for _, field in ipairs(redis.call('HKEYS', name)) do
      local hex = hex_of(bucket, field, bits)
      redis.call('UNLINK', rq_job(hex), rq_job_results(hex), rq_job_executions(hex))
      swept = swept + 1
    end
    redis.call('UNLINK', name)
  end
  return swept
end

-- ARGV: every other key of the run. The mark goes last.
local function finish()
  if redis.call('EXISTS', forgetting_key(run)) == 0 then return 0 end
  for i = 3, #ARGV do redis.call('UNLINK', ARGV[i]) end
  redis.call('SREM', RQ_QUEUES, rq_queue(run))
  redis.call('DEL', forgetting_key(run))
  return 1
end

local operations = {look = look, begin = begin, sweep = sweep, finish = finish}
return operations[operation]()
