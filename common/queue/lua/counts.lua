-- Read a run's counters so that they add up. ARGV: run.
-- Returns {in_flight, queued list length, parked, name, value, name, value ...}.

local run = ARGV[1]
local reply = {redis.call('ZCARD', leases_key(run)), redis.call('LLEN', rq_queue(run)),
  redis.call('ZCARD', parked_key(run))}
for _, part in ipairs(redis.call('HGETALL', counts_key(run))) do reply[#reply + 1] = part end
return reply
