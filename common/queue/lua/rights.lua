-- Find what the user may not do, before a script finds out in its midst: what it had written would stay.
--
-- ARGV: stem of keys that nobody uses, one in RQ's part.
-- Returns the missing rights as an ACL names them: a command, or the pattern of keys.

local stem, in_rq = ARGV[1], ARGV[2]
local hash, list, set, zset, stream = stem .. ':h', stem .. ':l', stem .. ':s', stem .. ':z', stem .. ':x'
local missing = {}

local function text_of(reply)
  return type(reply) == 'table' and reply.err or ''
end

local function keys_denied(reply)
  local text = text_of(reply)
  return string.find(text, 'of the keys mentioned', 1, true)
    or string.find(text, 'No permissions to access a key', 1, true)
end

local function denied(reply)
  local text = text_of(reply)
  return string.find(text, 'executing the script can', 1, true) or string.find(text, 'ACL failure', 1, true)
end

local function see(command, ...)
  local reply = redis.pcall(command, ...)
  if denied(reply) and not keys_denied(reply) then missing[#missing + 1] = string.lower(command) end
end

see('DEL', stream) -- first of all: then a full Redis takes the rest
for pattern, key in pairs({['~headrace:*'] = hash, ['~rq:*'] = in_rq}) do
  if keys_denied(redis.pcall('HEXISTS', key, 'a')) then missing[#missing + 1] = pattern end
end

see('HSET', hash, 'a', '1')
see('HSETNX', hash, 'a', '1')
see('HINCRBY', hash, 'a', '1')
see('HGET', hash, 'a')
see('HMGET', hash, 'a')
see('HGETALL', hash)
see('HKEYS', hash)
see('HLEN', hash)
see('HEXISTS', hash, 'a')
see('HDEL', hash, 'b')
see('EXPIRE', hash, '60')
see('PEXPIRE', hash, '60000')
see('PERSIST', hash)
see('RPUSH', list, 'a')
see('LPUSH', list, 'a')
see('LLEN', list)
see('LRANGE', list, '0', '0')
see('LPOP', list)
see('SADD', set, 'a')
see('SREM', set, 'a')
see('ZADD', zset, '1', 'a')
see('ZCARD', zset)
see('ZCOUNT', zset, '1', '1')
see('ZSCORE', zset, 'a')
see('ZRANGE', zset, '0', '-1')
see('ZREVRANGE', zset, '0', '0')
see('ZRANGEBYSCORE', zset, '0', '0')
see('ZREVRANGEBYSCORE', zset, '0', '0')
see('ZREMRANGEBYSCORE', zset, '0', '0')
see('ZREMRANGEBYLEX', zset, '[b', '[b')
see('ZREM', zset, 'b')
see('XADD', stream, '*', 'a', '1')
see('XLEN', stream)
see('XRANGE', stream, '-', '+')
see('XREVRANGE', stream, '+', '-')
see('XDEL', stream, '0-1')
see('SET', stem, '1')
see('GET', stem)
see('EXISTS', stem)
see('TIME')
see('INFO', 'replication')
see('UNLINK', stem, hash, list, set, zset, stream)
return missing
