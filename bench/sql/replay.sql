\set number random(1, 100000)
SELECT state, fingerprint, status, response FROM hand_replays WHERE key = sha256(int8send(:number)) AND expires_at > now();
