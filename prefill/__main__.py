"""`baton prefill`: one prefill worker process."""

from queue import SimpleQueue

from common.config import PrefillCommand
from common.engine.block_manager import BlockManager
from common.engine.worker import WorkerIdentity
from common.engine.worker_loop import Stop, WorkerLoop
from common.engine.worker_main import load_engine, run_until_stopped
from common.links import Links
from common.log import set_up_logging
from common.service import LinkEvent
from common.supervisor.channel import SupervisorChannel
from common.wire import Role
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedMemory
from kvtransfer.transport import KVReleased, SenderEffect
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
