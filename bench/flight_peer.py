"""pyarrow Flight with the bytes of one file, for stream_bench: `serve FILE BYTES` prints its port and process id,
`get PORT` prints the seconds that reading them all took."""
import os
import sys
import time

import pyarrow as pa
import pyarrow.flight as flight

BATCH = 2 << 20  # as the pieces of our stream


class Server(flight.FlightServerBase):
    def __init__(self, path, size):
        super().__init__("grpc://127.0.0.1:0")
        self.buffer = pa.memory_map(path).read_buffer(size)

    def do_get(self, context, ticket):
        schema = pa.schema([("states", pa.uint8())])

        def batches():
            for begin in range(0, self.buffer.size, BATCH):
                piece = self.buffer.slice(begin, min(BATCH, self.buffer.size - begin))
                array = pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])
                yield pa.record_batch([array], schema=schema)

        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, batches()))


def main():
    if sys.argv[1] == "serve":
        server = Server(sys.argv[2], int(sys.argv[3]))
        print(server.port, os.getpid(), flush=True)
        server.serve()
        return
    client = flight.connect(f"grpc://127.0.0.1:{sys.argv[2]}")
    begin = time.perf_counter()
    size = sum(chunk.data.nbytes for chunk in client.do_get(flight.Ticket(b"")))
    print(time.perf_counter() - begin, size)


main()
