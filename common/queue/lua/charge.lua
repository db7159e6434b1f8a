-- Charge an attempt to a prompt that its process goes on holding.
-- ARGV: run, key (16 bytes), reason (one word). Returns the attempts so far in this try.

local run, hex = ARGV[1], to_hex(ARGV[2])
if redis.call('EXISTS', rq_job(hex)) == 0 then return 0 end
count(run, 'retries', 1)
note_fault(run, ARGV[3])
return redis.call('HINCRBY', rq_job(hex), 'attempts', 1)
